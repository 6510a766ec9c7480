"""The program of the drills under Shoal: the same network, pace and saves as the peers' plain program.

Every step of every rank writes a line beside the checkpoints, where all nodes and the benchmark see it.
"""

from __future__ import annotations

import os
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel

from benchmarks.engines.steps import STEPS, TRACE
from benchmarks.recovery.job import SAVE_EVERY, network, note, one_step
from shoal import runtime


def main() -> None:
    kept = Path(os.environ["SHOAL_CHECKPOINT_DIR"])
    fd = os.open(kept / TRACE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    model, optimizer = network()

    def program(run: runtime.Run) -> None:
        replica = DistributedDataParallel(model)
        for step in run.steps(STEPS):
            one_step(replica, optimizer, step, run.rank)
            note(fd, step, run.rank)

    saved = runtime.Checkpoints(str(kept), every=SAVE_EVERY, keep=3)
    runtime.train(program, {"model": model, "optimizer": optimizer}, checkpoints=saved)


if __name__ == "__main__":
    main()
