"""A job that saves by its own interval is looked at from outside, damaged, and looked at again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.planes.simulated import SimulatedCluster, running_cluster
from tests.support.runtime.torchrun import needs_torch

PROGRAM = """
import time, torch
from shoal import runtime
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def program(run):
    for step in run.steps(60):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).pow(2).mean().backward()
        optimizer.step()
        time.sleep(0.05)

parts = {"model": model, "optimizer": optimizer}
with runtime.Checkpoints(keep=2) as saved:
    runtime.train(program, parts, checkpoints=saved)
"""
JOB = """
name: saver
run: python saver.py
workdir: .
checkpoint: {interval: 1s}
env: {OMP_NUM_THREADS: "1"}
"""
pytestmark = [pytest.mark.slow, needs_torch]


@pytest.fixture
def shoal(tmp_path: Path) -> Iterator[SimulatedCluster]:
    with running_cluster(tmp_path / "home") as cluster:
        yield cluster


def test_checkpoints_of_a_job_are_listed_verified_and_found_damaged(
    shoal: SimulatedCluster, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "saver.py").write_text(PROGRAM)
    (work / "job.yaml").write_text(JOB)
    shoal("run", str(work / "job.yaml"))
    told = json.loads(shoal("checkpoints", "saver", "--verify", "--json"))
    assert told["decision"]["reason"] == "interval"
    assert told["decision"]["interval_s"] == 1.0
    newest, before = told["items"]
    assert newest["step"] > before["step"]
    assert (newest["state"], newest["is_next"], newest["epoch"]) == ("verified", True, 1)
    (shard,) = Path(shoal.env["SHOAL_HOME"]).glob(f"checkpoints/*/step-{newest['step']:012d}-*/*.distcp")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    fd = os.open(shard, os.O_WRONLY)
    os.write(fd, data)
    os.close(fd)
    assert "complete, next" in shoal("checkpoints", "saver")
    told = json.loads(shoal("checkpoints", "saver", "--verify", "--json", code=1))
    assert [(one["state"], one["is_next"]) for one in told["items"]] == [
        ("damaged", False),
        ("verified", True),
    ]
