"""Training on two nodes that is preempted: it saves in its grace, and no step and no bit is lost."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.planes.simulated import SimulatedCluster, running_cluster
from tests.support.runtime.tasks import SOURCE
from tests.support.runtime.torchrun import torchrun

PROGRAM = """
import os, time
import torch
from torch.nn.parallel import DistributedDataParallel
from shoal import runtime
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

def program(run):
    replica = DistributedDataParallel(model)
    print("begins after", run.step, flush=True)
    for step in run.steps(300):
        x = torch.randn(16, 8)
        loss = (replica(x) - x.sum(dim=1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if os.environ.get("SHOAL_EPOCH") == "1":
            time.sleep(0.1)  # until it gives way; then there is nothing to wait for
        if run.rank == 0:
            print("step", step + 1, "loss", loss.item().hex(), flush=True)

saved = runtime.Checkpoints(os.environ.get("SHOAL_CHECKPOINT_DIR", "saved"), every=100000)
runtime.train(program, {"model": model, "optimizer": optimizer}, checkpoints=saved)
"""
STEPS = 300
pytestmark = pytest.mark.soak
TRAINING = """
name: gives-way
resources: {nodes: 2, gpus: 2, cpus: 1, memory: 2GB}
ranks_per_node: 1
workdir: WORKDIR
run: python train.py
env: {OMP_NUM_THREADS: "1"}
checkpoint: {}
grace: 2m
"""


@pytest.fixture
def shoal(tmp_path: Path) -> Iterator[SimulatedCluster]:
    with running_cluster(tmp_path / "home", "--demo", "2x2") as cluster:
        yield cluster


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return the program in a folder of its own, and the job that trains it."""
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    spec = tmp_path / "job.yaml"
    spec.write_text(TRAINING.replace("WORKDIR", str(folder)))
    return spec


def losses(log: str) -> dict[int, str]:
    return {int(step): loss for step, loss in re.findall(r"step (\d+) loss (\S+)", log)}


def test_preempted_job_saves_in_its_grace_and_continues_with_the_next_step(
    shoal: SimulatedCluster, job: Path, tmp_path: Path
) -> None:
    shoal("run", "-d", str(job))
    shoal.until(lambda: 5 in losses(shoal("logs", "gives-way")))
    shoal("run", "-d", "--name", "urgent", "--priority", "production", "--gpus", "2", "--", "sleep", "1")
    shoal.until(lambda: shoal.jobs("gives-way")[0]["epoch"] > 1)
    after = shoal("logs", "-f", "gives-way")
    before = shoal("logs", "gives-way", "--attempt", "1")
    last = max(losses(before))
    assert 5 <= last < STEPS
    begun = {int(step) for step in re.findall(r"begins after (\d+)", after)}
    assert begun == {last}, before[-2000:] + after[:2000]
    assert list(losses(before)) == list(range(1, last + 1))
    assert list(losses(after)) == list(range(last + 1, STEPS + 1))
    assert losses(before) | losses(after) == losses(
        torchrun(tmp_path / "program" / "train.py", PYTHONPATH=SOURCE)
    )
