"""Name the processes that ranks which ended well have left running, before they are ended with the job.

`nohup train.sh &` without `wait`, or a program that makes itself a daemon, ends with code 0 at once: its job
succeeds, and its work is cut off.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal import bounded_file
from shoal.clock import Clock

SETTLE_S = 0.3
"""Helpers of a program, such as the resource tracker of `multiprocessing`, end just after it."""
POLL_S = 0.02
MAX_BYTES = 4 << 10
MAX_NAMED = 3
MAX_LENGTH = 60


def left_running(find: Callable[[], set[int]], clock: Clock, wait: Callable[[float], object]) -> str | None:
    """A sentence about those that `find` still returns after a moment. None: nothing was left."""
    until = clock.monotonic() + SETTLE_S
    while found := find():
        if clock.monotonic() >= until:
            break
        wait(POLL_S)
    lines = [line for line in map(_command_line, sorted(found)) if line]
    if not lines:
        return None
    named = ", ".join(f"`{line}`" for line in lines[:MAX_NAMED])
    more = f" and {len(lines) - MAX_NAMED} more" if len(lines) > MAX_NAMED else ""
    what = "process" if len(lines) == 1 else "processes"
    return (
        f"the ranks have ended and left {len(lines)} {what} running, which end with the job: {named}{more}; "
        "if their work counts, let `run` wait for them: `wait` in a shell, the foreground for a daemon"
    )


def _command_line(pid: int) -> str:
    """Empty for a process that has ended."""
    try:
        words = bounded_file.read_start(f"/proc/{pid}/cmdline", MAX_BYTES).split(b"\0")
    except OSError:
        return ""
    line = " ".join(word.decode(errors="replace") for word in words if word)
    return line if len(line) <= MAX_LENGTH else f"{line[: MAX_LENGTH - 3]}..."
