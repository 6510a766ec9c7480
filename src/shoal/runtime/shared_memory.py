"""Where a job's ranks keep checkpoints in the memory of a node, and how it is given back when they are gone.

Outlives the ranks, so that those that follow find it; ends with the share. In a sandbox it is the sandbox's
own and ends with that.
"""

from __future__ import annotations

import os

from shoal.runtime import removal
from shoal.wire import Order

MEMORY = "/dev/shm"  # noqa: S108 - below it, a folder that only this user may enter
REMOVE_S = 5.0


def folder(uid: int, run: str, node: str) -> str:
    """Of one attempt on one node, also of nodes that are simulated on one machine: what is removed is never
    another's.
    """
    return os.path.join(MEMORY, f"shoal-{uid}-{run}{f'-{node}' if node else ''}")


def give_back(order: Order) -> None:
    """Remove what this share's ranks left there. None of them runs any more. May be repeated."""
    for uid in {os.getuid(), order.uid if order.uid is not None else os.getuid()}:
        removal.remove(folder(uid, order.attempt_id, order.node), timeout_s=REMOVE_S)
