"""Give up a group of ranks that is broken, without waiting for what it still wants to do.

Its connections are cut, so that whoever waits for this rank notices too. What may still be under way in it
must not hold up the training: whoever drops the last reference to a group waits for that, so a thread that
nothing depends on holds the last few groups, and waits in its place when it lets go of one.
"""

from __future__ import annotations

import contextlib
import queue
import threading

import torch.distributed as dist

from shoal.runtime.rank.lines import lines

KEPT = 4
"""Losses whose groups are held back: a program may refer to one in a replica that it still has."""

_left: queue.SimpleQueue[list[dist.ProcessGroup]] = queue.SimpleQueue()
_thread: threading.Thread | None = None


def leave() -> None:
    """Give up the group, so that its other members notice too. It may be half made, or broken."""
    groups = _groups()
    lines.cut()
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    # The number of groups so far is the next one's name, under which ranks look for each other's addresses.
    # One whose making failed is counted and never destroyed: a survivor would look for those who are new
    # under another name than theirs, and both wait until the time-out.
    dist.distributed_c10d._world.group_count = 0  # noqa: SLF001 - as destroying a group does
    _left.put(groups)
    _begin()


def _groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)  # noqa: SLF001 - there is no other list of them


def _begin() -> None:
    global _thread  # noqa: PLW0603 - one for the process, begun by the first loss
    if _thread is None:
        _thread = threading.Thread(target=_hold, name="shoal-left-groups", daemon=True)
        _thread.start()


def _hold() -> None:
    held = []  # a local of a daemon thread: not even the interpreter's end drops it
    while True:
        held.append(_left.get())
        if len(held) > KEPT:
            del held[0]
