"""Find what a rank's `run` left behind: a launcher, a member of the process group, or any other process.

`torchrun train.py &` as the last line of a script ends with code 0 at once. The training behind it is ended
with the job, so the job must not succeed. Launchers and members hold a lock while they run
(`warm/launcher_lock.py`).

`nohup train.sh &` without `wait`, or a program that becomes a daemon, also ends with code 0 at once. Its job
succeeds although its work is cut off, so the log names the processes that are ended with the job.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Callable

from shoal import bounded_file
from shoal.clock import Clock
from shoal.runtime.warm import launchers
from shoal.runtime.warm.launcher_lock import MAX_RANKS

PATIENCE_S = 5.0
"""How long a launcher whose work is done may take to end."""
LOCK_POLL_S = 0.05
FLOCK = "@hhqqi"
"""`struct flock` of 64-bit Linux: type, whence, start, length, pid."""
UNFINISHED_LAUNCHER = (
    "`run` ended in rank {rank} while a launcher or a member of the job's process group was still running "
    "there, which ends with the job; let `run` wait for it (`wait` as the last line), stop it in `run` if it "
    "is not needed any more (`kill %1`), or allow it with `world: any`"
)


def rank_with_unfinished_launcher(
    folder: str, rendezvous_round: int, clock: Clock, wait: Callable[[float], object]
) -> int | None:
    """Return the first rank that still holds one of the locks after a moment, or None.

    `folder`: where the stand-ins are installed.
    """
    until = clock.monotonic() + PATIENCE_S
    while True:
        held = (
            _holder(os.path.join(folder, name), rendezvous_round)
            for name in (launchers.LAUNCHING, launchers.STEPS, launchers.MEMBERS)
        )
        rank = next((rank for rank in held if rank is not None), None)
        if rank is None or clock.monotonic() >= until:
            return rank
        wait(LOCK_POLL_S)


def _holder(path: str, rendezvous_round: int) -> int | None:
    start = rendezvous_round * MAX_RANKS
    request = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, MAX_RANKS, 0)
    with contextlib.suppress(OSError):  # no rank has made the file, or the program has removed it
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            kind, _, at, _, _ = struct.unpack(FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, request)[: len(request)])
        finally:
            os.close(fd)
        return None if kind == fcntl.F_UNLCK else at - start
    return None


SETTLE_S = 0.3
"""Helpers of a program, such as the resource tracker of `multiprocessing`, end just after it."""
PROCESS_POLL_S = 0.02
MAX_BYTES = 4 << 10
MAX_NAMED = 3
MAX_LENGTH = 60


def describe_left_running(
    find: Callable[[], set[int]], clock: Clock, wait: Callable[[float], object]
) -> str | None:
    """Describe the processes that `find` still returns after a moment. None: nothing was left."""
    until = clock.monotonic() + SETTLE_S
    while pids := find():
        if clock.monotonic() >= until:
            break
        wait(PROCESS_POLL_S)
    lines = [line for line in map(_command_line, sorted(pids)) if line]
    if not lines:
        return None
    named = ", ".join(f"`{line}`" for line in lines[:MAX_NAMED])
    more = f" and {len(lines) - MAX_NAMED} more" if len(lines) > MAX_NAMED else ""
    noun = "process" if len(lines) == 1 else "processes"
    return (
        f"the ranks have ended and left {len(lines)} {noun} running, which end with the job: {named}{more}; "
        "if their work counts, let `run` wait for them: `wait` in a shell, the foreground for a daemon"
    )


def _command_line(pid: int) -> str:
    """Return the command line, empty for a process that has ended."""
    try:
        arguments = bounded_file.read_start(f"/proc/{pid}/cmdline", MAX_BYTES).split(b"\0")
    except OSError:
        return ""
    line = " ".join(word.decode(errors="replace") for word in arguments if word)
    return line if len(line) <= MAX_LENGTH else f"{line[: MAX_LENGTH - 3]}..."
