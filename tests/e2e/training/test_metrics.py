"""A program that trains under Shoal, loses the rank that logs, and shows one curve."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.planes.simulated import SimulatedCluster, rank_pid, running_cluster
from tests.support.runtime.torchrun import needs_torch

STEPS = 150
JOB = f"curve-{os.getpid()}"
pytestmark = [pytest.mark.slow, needs_torch]


@pytest.fixture
def shoal(tmp_path: Path) -> Iterator[SimulatedCluster]:
    with running_cluster(tmp_path / "home", "--demo", "1x2") as cluster:
        yield cluster


def curves(shoal: SimulatedCluster) -> dict[str, list[list[Any]]]:
    told = json.loads(shoal("metrics", JOB, "--json"))
    return {one["name"]: one["points"] for one in told["items"]}


@pytest.mark.soak
def test_training_that_lost_the_rank_that_logs_has_one_curve(shoal: SimulatedCluster) -> None:
    shoal("run", "-d", "--name", JOB, "-e", f"STEPS={STEPS}", "examples/language_model/ddp.yaml")
    shoal.until(lambda: len(curves(shoal).get("loss", ())) > 20)
    os.kill(rank_pid(JOB, "ddp.py", 0), signal.SIGKILL)
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
