"""The same network and batches under torchft: every rank is a replica that comes and goes by itself.

    torchft_job.py STEPS FILE

A replica that returns takes its state from a replica that survived. The others make their steps without it,
so *lost* steps are none, and meanwhile the sum over the batch differs.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from benchmarks.recovery.job import network, note, one_step


def main() -> None:
    steps, path = int(sys.argv[1]), sys.argv[2]
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    number = int(os.environ["RANK"])
    model, plain = network()

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        min_replica_size=1,
        replica_id=f"rank_{number}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=10),
    )
    replica, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, plain)
    while (step := manager.current_step()) < steps:
        one_step(replica, optimizer, step, number)
        if manager.current_step() != step:  # else it was not committed: a replica was lost in the middle
            note(fd, manager.current_step() - 1, number)


if __name__ == "__main__":
    main()
