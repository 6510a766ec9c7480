"""A warm process that forks supervisors: forked, one is at work in a few ms; executed, in about 50.

Started by an engine as `python -m shoal.runtime.nursery ROOM` with a socket as its standard input; it ends
when the engine's end of that socket is closed, so it never outlives the engine's process. A supervisor it
forks is as independent as an executed one: a session of its own and nothing open but what it was handed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys

MAX_PATH = 4096
HANDED_OVER = 2
"""Descriptors that come with a request: the supervisor's standard input, and the file for its errors."""
HIGHEST_DESCRIPTOR = 1 << 20
LOADED = (
    "shoal.runtime.entry",
    "shoal.runtime.http",
    "shoal.runtime.unpack",
    "shoal.runtime.warm.install",
)
"""Everything a supervisor ever imports, the late parts too: here it is paid for once."""


def serve(door: socket.socket) -> None:
    """Fork a supervisor for each directory asked for, until the engine is gone.

    `0` says that we are ready. Each answer is the supervisor's pid, or `0`: none could be forked.
    """
    os.umask(0o077)
    # Nobody here waits for supervisors; the kernel is told not to keep them for us.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it went while we were at work
        door.send(b"0")
        while True:
            directory, handed, _, _ = socket.recv_fds(door, MAX_PATH, HANDED_OVER)
            if not directory:
                return
            pid = _fork(os.fsdecode(directory), handed)
            for fd in handed:
                os.close(fd)
            door.send(b"%d" % pid)


def _fork(directory: str, handed: list[int]) -> int:
    if len(handed) != HANDED_OVER:
        return 0
    try:
        pid = os.fork()
    except OSError:
        return 0
    if pid == 0:
        _become_supervisor(directory, *handed)
    return pid


def _become_supervisor(directory: str, given: int, errors: int) -> None:
    """Never returns: this process must not go on as a second nursery."""
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd, target in ((given, 0), (errors, 1), (errors, 2)):
            os.dup2(fd, target)
        os.closerange(3, HIGHEST_DESCRIPTOR)
        importlib.import_module("shoal.runtime.kernel").rename(
            (sys.executable, "-m", "shoal.runtime.supervisor", directory)
        )
        status = importlib.import_module("shoal.runtime.entry").main([directory])
    except BaseException:  # noqa: BLE001 - told where an executed supervisor would tell it
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


if __name__ == "__main__":
    # msgspec takes typing_extensions where it is installed, for types nothing here uses.
    sys.modules["typing_extensions"] = None  # type: ignore[assignment]
    for name in LOADED:
        importlib.import_module(name)
    importlib.import_module("shoal.runtime.kernel").rename((sys.executable, "-m", "shoal.runtime.nursery"))
    gc.freeze()  # what is loaded stays shared with every supervisor
    serve(socket.socket(fileno=0))
