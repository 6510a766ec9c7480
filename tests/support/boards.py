"""Which of a job's processes train, and as whom: what they themselves have said on their supervisor's board.

A spare, and a rank that is still on its way, have the same command line as those that train.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from shoal.runtime.board import MAX_SLOTS, Board, Standing


def training(pids: Iterable[int]) -> dict[int, int]:
    """The process of each rank that is in the group which is newest, by rank."""
    found: dict[int, tuple[int, int]] = {}
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):  # it may end while it is looked at
            own, board = _inside(pid), _board(pid)
            for slot in range(MAX_SLOTS):
                beat, place = board.beat(slot), board.place(slot)
                if beat.pid == own and beat.standing is Standing.JOINED and place is not None:
                    found[place.rank] = max(found.get(place.rank, (-1, 0)), (beat.generation, pid))
    newest = max((generation for generation, _ in found.values()), default=0)
    return {rank: pid for rank, (generation, pid) in sorted(found.items()) if generation == newest}


def _inside(pid: int) -> int:
    """The number that the process itself knows."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("NSpid")).split()[-1])


def _board(pid: int) -> Board:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if "memfd:shoal-board" in str(link.readlink()):
            fd = os.open(link, os.O_RDWR)
            try:
                return Board(fd)
            finally:
                os.close(fd)
    raise ValueError(f"{pid} has no board")
