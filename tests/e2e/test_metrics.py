"""A program that trains under Shoal, loses the rank that logs, and shows one curve."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.shares import processes_with, until
from tests.support.simulated import LIMIT_S, Cluster

STEPS = 150
JOB = "curve"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None, reason="torch is not installed: pip install 'shoal[train]'"
    ),
]


@pytest.fixture
def shoal(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path / "home")
    cluster("up", "--demo", "1x2", "--listen", "127.0.0.1:0")
    yield cluster
    cluster("down", "--jobs")


def curves(shoal: Cluster) -> dict[str, list[list[Any]]]:
    told = json.loads(shoal("metrics", JOB, "--json"))
    return {one["name"]: one["points"] for one in told["items"]}


def test_training_that_lost_the_rank_that_logs_has_one_curve(shoal: Cluster) -> None:
    shoal("run", "-d", "--name", JOB, "-e", f"STEPS={STEPS}", "examples/language_model/ddp.yaml")
    until(lambda: len(curves(shoal).get("loss", ())) > 20, LIMIT_S)
    os.kill(rank(0), signal.SIGKILL)
    said = shoal("logs", "-f", JOB)
    assert "steps lost" in said
    found = curves(shoal)
    told = [point[0] for point in found["loss"]]
    assert told == sorted(set(told))
    assert told[-1] == STEPS - 1
    # A step that was complete is not made again: what its rank had not said before it died, nobody says.
    assert len(set(range(STEPS)) - set(told)) <= 1
    assert found["loss"][-1][1] < found["loss"][0][1]
    parts = {"input_s", "checkpoint_s", "communication_s", "compute_s"}
    assert {"steps_per_s", "step_s", "cpus_used", "memory_bytes"} | parts <= found.keys()
    assert all(point[1] > 0 for point in found["steps_per_s"])
    assert "step 149" in shoal("metrics", JOB, "--plot", "loss")


def rank(number: int) -> int:
    """The process of one rank of the job."""
    mine = {f"RANK={number}".encode(), f"SLURM_JOB_NAME={JOB}".encode()}
    found = [
        pid
        for pid in processes_with("ddp.py")
        if mine <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    ]
    return found[-1]
