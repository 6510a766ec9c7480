"""A program that uses `shoal.runtime` loses a rank and goes on: no step is lost, and no bit is different."""

from __future__ import annotations

import os
import re
import signal
import time
import uuid
from pathlib import Path

import pytest

from shoal.runtime.ports import free_port
from shoal.wire import EndKind, NodeOutcome, Order
from tests.support.boards import training
from tests.support.shares import SOURCE, RunningShare, Start, an_order, processes_with, until
from tests.support.torchrun import torchrun

PROGRAM = """
import hashlib, os, sys, time
import torch
from torch.nn.parallel import DistributedDataParallel
from shoal import runtime
STEPS = int(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

def program(run):
    replica = DistributedDataParallel(model)
    for step in run.steps(STEPS):
        x = torch.randn(16, 8)
        loss = (replica(x) - x.sum(dim=1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0 if os.path.exists("hurry") else 0.05)
        if run.rank == 0:
            print("step", step, flush=True)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print("weights", hashlib.sha256(weights).hexdigest(), flush=True)

saved = runtime.Checkpoints("saved", every=10)
runtime.train(program, {"model": model, "optimizer": optimizer}, checkpoints=saved)
"""
STEPS = 400
pytestmark = pytest.mark.soak
NAME = f"loses_ranks_{uuid.uuid4().hex}.py"
"""Of this process alone: others may run this test too."""


def order(**changes: object) -> Order:
    values: dict[str, object] = {
        "setup": f"cat > {NAME} <<'END'\n{PROGRAM}\nEND",
        "run": f"python {NAME} {STEPS}",
        "ranks_per_node": 2,
        "max_restarts": 5,
        "master_port": free_port("127.0.0.1", 97 * os.getpid()),
        "env": {"OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE},
    }
    return an_order(**{**values, **changes})


def ranks() -> list[int]:
    """Ranks and the spare, oldest first; neither the zygote nor those that stand in for them."""
    return sorted(processes_with(f"bin/python\0{NAME}\0{STEPS}\0"))


def are_there(count: int) -> bool:
    """Whether so many ranks train and a spare is beside them."""
    found = ranks()
    return len(found) == count + 1 and len(training(found)) == count


def steps(share: RunningShare) -> list[int]:
    return [int(text.split()[1]) for text in share.texts() if text.startswith("step")]


def to_the_end(share: RunningShare) -> NodeOutcome:
    """All harm is done: what is left of the training takes no pause between its steps."""
    Path(share.share.work, "hurry").touch()
    return share.outcome(90)


def weights(lines: list[str]) -> set[str]:
    """Two ranks on one stream may write into one line."""
    return set(re.findall("[0-9a-f]{64}", " ".join(lines)))


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The weights of a run that nothing happens to, outside of Shoal."""
    path = tmp_path_factory.mktemp("alone") / NAME
    path.write_text(PROGRAM)
    (path.parent / "hurry").touch()
    return weights(torchrun(path, str(STEPS), PYTHONPATH=SOURCE).splitlines())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_and_stopped_ranks_cost_no_step_and_no_bit(
    start: Start, unharmed: set[str], how: signal.Signals
) -> None:
    share = start(order())
    share.spawn()
    for goal in (20, 50):
        until(lambda: len(steps(share)) >= goal and are_there(2), 60, share.describe)  # noqa: B023
        os.kill(training(ranks())[0], how)
        seen = len(steps(share))
        until(lambda: len(steps(share)) > seen + 5, 120, share.describe)  # noqa: B023
    outcome = to_the_end(share)
    assert outcome.kind is EndKind.SUCCEEDED, share.describe()
    assert outcome.restarts >= 2
    assert weights(share.texts()) == unharmed
    assert max(steps(share).count(step) for step in range(STEPS)) <= 2
    told = " ".join(share.texts("e"))
    assert "from rank" in told, "the state came from a surviving rank"


def test_ranks_that_do_not_wait_for_the_lost_one_notice_and_live_on(start: Start) -> None:
    share = start(order(ranks_per_node=4))
    share.spawn()
    for goal in (20, 40):
        until(lambda: len(steps(share)) >= goal and are_there(4), 90, share.describe)  # noqa: B023
        os.kill(training(ranks())[3], signal.SIGKILL)
        seen = len(steps(share))
        until(lambda: len(steps(share)) > seen + 5, 120, share.describe)  # noqa: B023
    assert to_the_end(share).kind is EndKind.SUCCEEDED, share.describe()
    told = " ".join(text for rank, _, text in share.log() if rank == "-")
    assert told.count("3 ranks lived on") == 2, share.describe()
    assert "had not left the group" not in told


def test_when_every_rank_is_lost_the_last_checkpoint_is_where_they_go_on(
    start: Start, unharmed: set[str]
) -> None:
    share = start(order(max_restarts=9))
    share.spawn()
    until(lambda: len(steps(share)) >= 30 and len(ranks()) == 3, 60, share.describe)
    for pid in ranks():
        os.kill(pid, signal.SIGKILL)
    outcome = to_the_end(share)
    assert outcome.kind is EndKind.SUCCEEDED, share.describe()
    assert weights(share.texts()) == unharmed
    assert "from a checkpoint" in " ".join(share.texts("e"))
    assert steps(share).count(0) == 1, "nobody began from the start again"


@pytest.mark.timeout(400)
def test_ranks_that_are_lost_while_the_next_group_forms_are_replaced_too(
    start: Start, unharmed: set[str]
) -> None:
    share = start(order(max_restarts=30))
    share.spawn()
    for goal in (20, 40, 60):
        until(lambda: len(steps(share)) >= goal and are_there(2), 60, share.describe)  # noqa: B023
        lost, survivor = training(ranks()).values()
        os.kill(lost, signal.SIGKILL)
        time.sleep(0.03)  # somewhere between two groups
        # Not the survivor: with it, all state would be lost.
        os.kill(next(pid for pid in ranks() if pid not in (lost, survivor)), signal.SIGKILL)
        seen = len(steps(share))
        until(lambda: len(steps(share)) > seen + 5, 120, share.describe)  # noqa: B023
    outcome = to_the_end(share)
    assert outcome.kind is EndKind.SUCCEEDED, share.describe()
    assert weights(share.texts()) == unharmed
