"""A program that uses `shoal.runtime` loses a rank and continues: no step is lost, and no bit differs."""

from __future__ import annotations

import os
import re
import signal
import time
import uuid
from pathlib import Path

import pytest

from shoal.runtime.process.network import free_port
from shoal.wire import EndKind, TaskOutcome, TaskSpec
from tests.support.runtime.rank_boards import training_pids
from tests.support.runtime.tasks import SOURCE, RunningTask, StartTask, a_task_spec, pids_with, until
from tests.support.runtime.torchrun import torchrun

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
"""A mark of this process alone, because others may run this test at the same time."""


def task_spec(**changes: object) -> TaskSpec:
    values: dict[str, object] = {
        "setup": f"cat > {NAME} <<'END'\n{PROGRAM}\nEND",
        "run": f"python {NAME} {STEPS}",
        "ranks_per_node": 2,
        "max_restarts": 5,
        "master_port": free_port("127.0.0.1", 97 * os.getpid()),
        "env": {"OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE},
    }
    return a_task_spec(**{**values, **changes})


def ranks() -> list[int]:
    """Return the ranks and the spare, oldest first, without the zygote and the stand-ins."""
    return sorted(pids_with(f"bin/python\0{NAME}\0{STEPS}\0"))


def are_there(count: int) -> bool:
    """Whether this many ranks train and a spare waits beside them."""
    pids = ranks()
    return len(pids) == count + 1 and len(training_pids(pids)) == count


def steps(task: RunningTask) -> list[int]:
    return [int(text.split()[1]) for text in task.texts() if text.startswith("step")]


def to_the_end(task: RunningTask) -> TaskOutcome:
    """Let the rest of the training run without pauses, because all harm is done."""
    Path(task.task.work, "hurry").touch()
    return task.outcome(90)


def weights(lines: list[str]) -> set[str]:
    """Return the weights. Two ranks on one stream may write into one line."""
    return set(re.findall("[0-9a-f]{64}", " ".join(lines)))


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the weights of an undisturbed run outside of Shoal."""
    path = tmp_path_factory.mktemp("alone") / NAME
    path.write_text(PROGRAM)
    (path.parent / "hurry").touch()
    return weights(torchrun(path, str(STEPS), PYTHONPATH=SOURCE).splitlines())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_and_stopped_ranks_cost_no_step_and_no_bit(
    start: StartTask, unharmed: set[str], how: signal.Signals
) -> None:
    task = start(task_spec())
    task.spawn()
    for goal in (20, 50):
        until(lambda: len(steps(task)) >= goal and are_there(2), 60, task.describe)  # noqa: B023
        os.kill(training_pids(ranks())[0], how)
        seen = len(steps(task))
        until(lambda: len(steps(task)) > seen + 5, 120, task.describe)  # noqa: B023
    outcome = to_the_end(task)
    assert outcome.kind is EndKind.SUCCEEDED, task.describe()
    assert outcome.restarts >= 2
    assert weights(task.texts()) == unharmed
    assert max(steps(task).count(step) for step in range(STEPS)) <= 2
    log = " ".join(task.texts("e"))
    assert "from rank" in log, "the state came from a surviving rank"


def test_ranks_that_do_not_wait_for_a_lost_one_notice_the_loss_and_survive(start: StartTask) -> None:
    task = start(task_spec(ranks_per_node=4))
    task.spawn()
    for goal in (20, 40):
        until(lambda: len(steps(task)) >= goal and are_there(4), 90, task.describe)  # noqa: B023
        os.kill(training_pids(ranks())[3], signal.SIGKILL)
        seen = len(steps(task))
        until(lambda: len(steps(task)) > seen + 5, 120, task.describe)  # noqa: B023
    assert to_the_end(task).kind is EndKind.SUCCEEDED, task.describe()
    log = " ".join(text for rank, _, text in task.log() if rank == "-")
    assert log.count("3 ranks lived on") == 2, task.describe()
    assert "had not left the group" not in log


def test_ranks_continue_from_the_last_checkpoint_if_all_are_lost(
    start: StartTask, unharmed: set[str]
) -> None:
    task = start(task_spec(max_restarts=9))
    task.spawn()
    until(lambda: len(steps(task)) >= 30 and len(ranks()) == 3, 60, task.describe)
    for pid in ranks():
        os.kill(pid, signal.SIGKILL)
    outcome = to_the_end(task)
    assert outcome.kind is EndKind.SUCCEEDED, task.describe()
    assert weights(task.texts()) == unharmed
    assert "from a checkpoint" in " ".join(task.texts("e"))
    assert steps(task).count(0) == 1, "no rank started from the beginning again"


@pytest.mark.timeout(400)
def test_ranks_that_are_lost_while_the_next_group_forms_are_replaced_too(
    start: StartTask, unharmed: set[str]
) -> None:
    task = start(task_spec(max_restarts=30))
    task.spawn()
    for goal in (20, 40, 60):
        until(lambda: len(steps(task)) >= goal and are_there(2), 60, task.describe)  # noqa: B023
        lost, survivor = training_pids(ranks()).values()
        os.kill(lost, signal.SIGKILL)
        time.sleep(0.03)  # somewhere between two groups
        # Not the survivor, because all state would be lost with it.
        os.kill(next(pid for pid in ranks() if pid not in (lost, survivor)), signal.SIGKILL)
        seen = len(steps(task))
        until(lambda: len(steps(task)) > seen + 5, 120, task.describe)  # noqa: B023
    outcome = to_the_end(task)
    assert outcome.kind is EndKind.SUCCEEDED, task.describe()
    assert weights(task.texts()) == unharmed
