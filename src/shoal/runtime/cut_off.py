"""Find a rank whose `run` has ended before its launcher, or before a member of the job's process group.

`torchrun train.py &` as the last line of a script ends with code 0 at once. The training behind it is ended
with the job, so the job must not succeed. Launchers and members hold a lock while they run
(`warm/one_launcher.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Callable

from shoal.clock import Clock
from shoal.runtime.warm import names
from shoal.runtime.warm.one_launcher import MAX_RANKS

PATIENCE_S = 5.0
"""A launcher whose work is done may take as long to end."""
POLL_S = 0.05
FLOCK = "@hhqqi"
"""`struct flock` of 64-bit Linux: type, from where, start, length, process."""
CUT_OFF = (
    "`run` ended in rank {rank} while a launcher or a member of the job's process group was still running "
    "there, which ends with the job; let `run` wait for it (`wait` as the last line), stop it in `run` if it "
    "is not needed any more (`kill %1`), or allow it with `world: any`"
)


def rank_at_work(folder: str, generation: int, clock: Clock, wait: Callable[[float], object]) -> int | None:
    """Return the first rank that still holds one of the locks after a moment, or None.

    `folder`: where the stand-ins are installed.
    """
    until = clock.monotonic() + PATIENCE_S
    while True:
        held = (_holder(os.path.join(folder, name), generation) for name in (names.LAUNCHING, names.MEMBERS))
        rank = next((rank for rank in held if rank is not None), None)
        if rank is None or clock.monotonic() >= until:
            return rank
        wait(POLL_S)


def _holder(path: str, generation: int) -> int | None:
    start = generation * MAX_RANKS
    asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, MAX_RANKS, 0)
    with contextlib.suppress(OSError):  # no rank has made the file, or the program has removed it
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            kind, _, at, _, _ = struct.unpack(FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked)[: len(asked)])
        finally:
            os.close(fd)
        return None if kind == fcntl.F_UNLCK else at - start
    return None
