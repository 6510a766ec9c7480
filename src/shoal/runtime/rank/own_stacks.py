"""Have this process write where it stands when its supervisor asks, in the middle of whatever it does."""

from __future__ import annotations

import faulthandler
import os

from shoal.runtime.board import STACKS_SIGNAL, stacks_at


def answer(fd: int, slot: int) -> bool:
    """From now on a signal writes the stacks of all threads into the board's file. False: it cannot be.

    Written by the signal handler itself: a thread that holds Python's lock and never returns is no obstacle.
    """
    try:
        # Opened again for an offset of our own: the descriptor is shared with every rank of the node.
        own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC)
        os.lseek(own, stacks_at(slot), os.SEEK_SET)
        faulthandler.register(STACKS_SIGNAL, file=own, all_threads=True, chain=False)
    except (OSError, RuntimeError, ValueError):
        return False
    return True
