"""Training that stands still: who holds it up is named with its line, and the stacks of all are kept."""

from __future__ import annotations

import os
import signal
import uuid

import pytest

from shoal.runtime.ports import free_port
from shoal.wire import EndKind, Order
from tests.support.boards import training
from tests.support.confinements import CGROUP
from tests.support.shares import SOURCE, RunningShare, Start, an_order, processes_with, until

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
        if step == 30 and os.environ["SHOAL_GENERATION"] == "0" and os.environ["RANK"] == "1" and HANGS:
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


def order(*, hangs: bool, confinement: tuple[str, ...] = ()) -> Order:
    text = PROGRAM.replace("HANGS", str(hangs))
    return an_order(
        setup=f"cat > {NAME} <<'END'\n{text}\nEND",
        run=f"python {NAME} {hangs}",
        ranks_per_node=2,
        max_restarts=3,
        master_port=free_port("127.0.0.1", 97 * os.getpid()),
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE},
        confinement=confinement,
    )


def stacks(share: RunningShare) -> dict[str, str]:
    """By rank."""
    found: dict[str, str] = {}
    for rank, letter, text in share.log():
        if letter == "t":
            found[rank] = found.get(rank, "") + text + "\n"
    return found


def complaints(share: RunningShare) -> list[str]:
    return [text for text in share.texts("e") if "hung and was killed" in text]


@pytest.mark.parametrize("confinement", [(), pytest.param((CGROUP,), marks=pytest.mark.soak)])
def test_rank_that_stands_in_its_own_code_is_named_with_its_line(
    start: Start, confinement: tuple[str, ...]
) -> None:
    """Also where no control group counts what it works, as for most users of a Slurm."""
    share = start(order(hangs=True, confinement=confinement))
    share.spawn()
    assert share.outcome(90).kind is EndKind.SUCCEEDED, share.describe()
    told = complaints(share)[0]
    assert told.startswith("rank 1 hung and was killed: no step for ")
    assert f"it stood in bad_disk ({NAME}:10)" in told
    assert set(stacks(share)) == {"0", "1"}
    assert "torch/autograd" in stacks(share)["0"]
    assert "bad_disk" in stacks(share)["1"]


@pytest.mark.soak
def test_stopped_rank_is_named_with_the_line_it_was_stopped_at(start: Start) -> None:
    share = start(order(hangs=False))
    share.spawn()
    until(lambda: "step 20" in share.texts(), 60, share.describe)
    os.kill(training(processes_with(f"bin/python\0{NAME}\0"))[1], signal.SIGSTOP)
    assert share.outcome(90).kind is EndKind.SUCCEEDED, share.describe()
    told = complaints(share)[0]
    assert "; it stood in " in told
    assert set(stacks(share)) == {"0", "1"}
