"""Training that hangs: the rank that holds it up is named with its line, and all stacks are logged."""

from __future__ import annotations

import os
import signal
import uuid

import pytest

from shoal.runtime.process.network import free_port
from shoal.wire import EndKind, TaskSpec
from tests.support.runtime.confinement_modes import CGROUP
from tests.support.runtime.rank_boards import training_pids
from tests.support.runtime.tasks import SOURCE, RunningTask, StartTask, a_task_spec, pids_with, until

PROGRAM = """
import os, time
import torch
from torch.nn.parallel import DistributedDataParallel
from shoal import runtime
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

def bad_disk():
    time.sleep(600)

def program(run):
    replica = DistributedDataParallel(model)
    for step in run.steps(80):
        if step == 30 and os.environ["SHOAL_RENDEZVOUS_ROUND"] == "0" and os.environ["RANK"] == "1" and HANGS:
            bad_disk()
        optimizer.zero_grad()
        replica(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        time.sleep(0.02)
        if run.rank == 0:
            print("step", step, flush=True)

runtime.train(program, {"model": model, "optimizer": optimizer})
"""
pytestmark = pytest.mark.slow
NAME = f"hangs_{uuid.uuid4().hex}.py"


def task_spec(*, hangs: bool, confinement: tuple[str, ...] = ()) -> TaskSpec:
    text = PROGRAM.replace("HANGS", str(hangs))
    return a_task_spec(
        setup=f"cat > {NAME} <<'END'\n{text}\nEND",
        run=f"python {NAME} {hangs}",
        ranks_per_node=2,
        max_restarts=3,
        master_port=free_port("127.0.0.1", 97 * os.getpid()),
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE},
        confinement=confinement,
    )


def stacks(task: RunningTask) -> dict[str, str]:
    """Return the stacks by rank."""
    stacks_of: dict[str, str] = {}
    for rank, letter, text in task.log():
        if letter == "t":
            stacks_of[rank] = stacks_of.get(rank, "") + text + "\n"
    return stacks_of


def complaints(task: RunningTask) -> list[str]:
    return [text for text in task.texts("e") if "hung and was killed" in text]


@pytest.mark.parametrize("confinement", [(), pytest.param((CGROUP,), marks=pytest.mark.soak)])
def test_rank_that_hangs_in_its_own_code_is_named_with_its_line(
    start: StartTask, confinement: tuple[str, ...]
) -> None:
    """Also without cgroups to measure its work, as for most users of a Slurm cluster."""
    task = start(task_spec(hangs=True, confinement=confinement))
    task.spawn()
    assert task.outcome(90).kind is EndKind.SUCCEEDED, task.describe()
    message = complaints(task)[0]
    assert message.startswith("rank 1 hung and was killed: no step for ")
    assert f"it stood in bad_disk ({NAME}:10)" in message
    assert set(stacks(task)) == {"0", "1"}
    assert "torch/autograd" in stacks(task)["0"]
    assert "bad_disk" in stacks(task)["1"]


@pytest.mark.soak
def test_stopped_rank_is_named_with_the_line_where_it_was_stopped(start: StartTask) -> None:
    task = start(task_spec(hangs=False))
    task.spawn()
    until(lambda: "step 20" in task.texts(), 60, task.describe)
    os.kill(training_pids(pids_with(f"bin/python\0{NAME}\0"))[1], signal.SIGSTOP)
    assert task.outcome(90).kind is EndKind.SUCCEEDED, task.describe()
    message = complaints(task)[0]
    assert "; it stood in " in message
    assert set(stacks(task)) == {"0", "1"}
