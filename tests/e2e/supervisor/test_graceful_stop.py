"""A rank in `runtime.train` gets SIGTERM from outside of Shoal, alone or with all processes of its job."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from shoal.runtime.process import tree
from shoal.runtime.process.network import free_port
from shoal.wire import EndKind
from tests.support.runtime.rank_boards import training_pids
from tests.support.runtime.tasks import SOURCE, RunningTask, StartTask, a_task_spec, stop_all_processes, until

PROGRAM = """
import time
import torch
from shoal import runtime
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

def program(run):
    for step in run.steps(1000000):
        model(torch.ones(2, 4)).sum().backward()
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
        optimizer.step()
        time.sleep(0.02)
        print("step", step + 1, flush=True)

saved = runtime.Checkpoints("saved", every=1000000)
runtime.train(program, {"model": model, "optimizer": optimizer}, checkpoints=saved, backend="gloo")
"""


def begun(start: StartTask, run: str = "exec python train.py") -> tuple[RunningTask, subprocess.Popen[bytes]]:
    """Start two ranks that train and have saved nothing."""
    task = start(
        a_task_spec(
            setup=f"cat > train.py <<'END'\n{PROGRAM}\nEND",
            run=run,
            ranks_per_node=2,
            master_port=free_port("127.0.0.1", 97 * os.getpid()),
            env={"OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE},
            grace_s=30.0,
        )
    )
    process = task.spawn()
    until(lambda: "step 5" in task.texts(), 60, task.describe)
    return task, process


def saved(task: RunningTask) -> list[int]:
    """Return the steps that have checkpoints."""
    names = [path.name for path in Path(task.task.work, "saved").glob("step-*")]
    return [int(match[1]) for name in names if (match := re.match(r"step-(\d+)", name))]


@pytest.mark.parametrize(("run", "gap_s"), [("exec python train.py", 0.0), ("python train.py; exit $?", 0.1)])
def test_ranks_save_if_a_signal_to_all_reaches_them_before_the_supervisor(
    start: StartTask, run: str, gap_s: float
) -> None:
    task, process = begun(start, run)
    outcome = stop_all_processes(task, process, gap_s)
    assert (outcome.kind, outcome.is_external_stop) == (EndKind.STOPPED, True)
    steps = [int(text.split()[1]) for text in task.texts() if text.startswith("step")]
    assert saved(task) == [max(steps)], task.describe()


def test_signal_to_one_rank_ends_it(start: StartTask) -> None:
    task, process = begun(start)
    ranks = training_pids(tree.descendants(process.pid))
    os.kill(ranks[1], signal.SIGTERM)
    outcome = task.outcome()
    assert (outcome.kind, outcome.signal, outcome.rank) == (EndKind.SIGNALED, signal.SIGTERM, 1)
    assert saved(task) == []
