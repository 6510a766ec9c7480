"""Training on two nodes that gives way to another job: saved in its grace, no step and no bit lost."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.shares import SOURCE, until
from tests.support.simulated import LIMIT_S, Cluster

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
        time.sleep(float(os.environ["PAUSE_S"]))
        if run.rank == 0:
            print("step", step + 1, "loss", loss.item().hex(), flush=True)

saved = runtime.Checkpoints(os.environ.get("SHOAL_CHECKPOINT_DIR", "saved"), every=100000)
runtime.train(program, {"model": model, "optimizer": optimizer}, checkpoints=saved)
"""
STEPS = 300
TRAINING = """
name: gives-way
resources: {nodes: 2, gpus: 2, cpus: 1, memory: 2GB}
ranks_per_node: 1
workdir: WORKDIR
run: python train.py
env: {OMP_NUM_THREADS: "1", PAUSE_S: "0.1"}
checkpoint: {}
grace: 2m
"""


@pytest.fixture
def shoal(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path / "home")
    cluster("up", "--demo", "2x2", "--listen", "127.0.0.1:0")
    yield cluster
    cluster("down", "--jobs")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The program in a folder of its own, and the job that trains it."""
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    spec = tmp_path / "job.yaml"
    spec.write_text(TRAINING.replace("WORKDIR", str(folder)))
    return spec


def losses(said: str) -> dict[int, str]:
    return {int(step): loss for step, loss in re.findall(r"step (\d+) loss (\S+)", said)}


def undisturbed(folder: Path) -> dict[int, str]:
    """The losses of the same program where nothing happens to it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, "train.py"],
        env={**kept, "OMP_NUM_THREADS": "1", "PAUSE_S": "0", "PYTHONPATH": SOURCE},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    return losses(done.stdout)


def test_job_that_gives_way_saves_in_its_grace_and_goes_on_with_the_very_next_step(
    shoal: Cluster, job: Path, tmp_path: Path
) -> None:
    shoal("run", "-d", str(job))
    until(lambda: 5 in losses(shoal("logs", "gives-way")), LIMIT_S)
    shoal("run", "-d", "--name", "urgent", "--priority", "production", "--gpus", "2", "--", "sleep", "1")
    until(lambda: len(losses(shoal("logs", "gives-way"))) == STEPS or "begins" in second(shoal), LIMIT_S)
    after = shoal("logs", "-f", "gives-way")
    before = shoal("logs", "gives-way", "--attempt", "1")
    last = max(losses(before))
    assert 5 <= last < STEPS
    begun = {int(step) for step in re.findall(r"begins after (\d+)", after)}
    assert begun == {last}, before[-2000:] + after[:2000]
    assert list(losses(before)) == list(range(1, last + 1))
    assert list(losses(after)) == list(range(last + 1, STEPS + 1))
    assert losses(before) | losses(after) == undisturbed(tmp_path / "program")


def second(shoal: Cluster) -> str:
    """What the newest attempt says, once it is not the first."""
    (one,) = shoal.jobs("gives-way")
    return shoal("logs", "gives-way") if one["epoch"] > 1 else ""
