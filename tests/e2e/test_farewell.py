"""A rank in `runtime.train` is sent SIGTERM by others than its supervisor: with all of its job, or alone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from shoal.runtime import tree
from shoal.runtime.ports import free_port
from shoal.wire import EndKind
from tests.support.boards import training
from tests.support.shares import SOURCE, RunningShare, Start, an_order, told_to_end, until

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


def begun(start: Start, run: str = "exec python train.py") -> tuple[RunningShare, subprocess.Popen[bytes]]:
    """Two ranks that train, and have saved nothing."""
    share = start(
        an_order(
            setup=f"cat > train.py <<'END'\n{PROGRAM}\nEND",
            run=run,
            ranks_per_node=2,
            master_port=free_port("127.0.0.1", 97 * os.getpid()),
            env={"OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE},
            grace_s=30.0,
        )
    )
    process = share.spawn()
    until(lambda: "step 5" in share.texts(), 60, share.describe)
    return share, process


def saved(share: RunningShare) -> list[int]:
    """The steps that there are checkpoints of."""
    names = [path.name for path in Path(share.share.work, "saved").glob("step-*")]
    return [int(found[1]) for name in names if (found := re.match(r"step-(\d+)", name))]


@pytest.mark.parametrize(("run", "gap_s"), [("exec python train.py", 0.0), ("python train.py; exit $?", 0.1)])
def test_ranks_save_where_a_signal_to_all_of_a_job_reaches_them_first(
    start: Start, run: str, gap_s: float
) -> None:
    share, process = begun(start, run)
    outcome = told_to_end(share, process, gap_s)
    assert (outcome.kind, outcome.is_unasked) == (EndKind.STOPPED, True)
    steps = [int(text.split()[1]) for text in share.texts() if text.startswith("step")]
    assert saved(share) == [max(steps)], share.describe()


def test_signal_to_one_rank_alone_ends_it(start: Start) -> None:
    share, process = begun(start)
    ranks = training(tree.descendants(process.pid))
    os.kill(ranks[1], signal.SIGTERM)
    outcome = share.outcome()
    assert (outcome.kind, outcome.signal, outcome.rank) == (EndKind.SIGNALED, signal.SIGTERM, 1)
    assert saved(share) == []
