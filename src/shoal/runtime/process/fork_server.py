"""A warm process that forks supervisors: a forked one works within a few ms, an executed one after about 50.

An engine starts it as `python -m shoal.runtime.process.fork_server ROOM` with a socket as its standard input.
It ends when the engine's end of that socket is closed, so it never outlives the engine's process. A forked
supervisor is as independent as an executed one: it leads a session of its own, and nothing is open except the
descriptors that came with the request.
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
NUM_DESCRIPTORS = 2
"""Descriptors that come with a request: the supervisor's standard input, and the file for its errors."""
HIGHEST_DESCRIPTOR = 1 << 20
LOADED = (
    "shoal.runtime.supervisor.entry",
    "shoal.runtime.lease.http_exchange",
    "shoal.runtime.files.unpack",
    "shoal.runtime.warm.install",
)
"""Every module that a supervisor ever imports, including the late ones. Here each is imported once."""


def serve(connection: socket.socket) -> None:
    """Fork a supervisor for each directory that the engine sends, until the engine is gone.

    The first reply, `0`, says that the server is ready. Each further reply is a supervisor's pid, or `0` if
    none could be forked.
    """
    os.umask(0o077)
    # Nothing here waits for supervisors, so the kernel must not keep them as zombies.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the engine may go at any time
        connection.send(b"0")
        while True:
            directory, handed, _, _ = socket.recv_fds(connection, MAX_PATH, NUM_DESCRIPTORS)
            if not directory:
                return
            pid = _fork(os.fsdecode(directory), handed)
            for fd in handed:
                os.close(fd)
            connection.send(b"%d" % pid)


def _fork(directory: str, handed: list[int]) -> int:
    if len(handed) != NUM_DESCRIPTORS:
        return 0
    try:
        pid = os.fork()
    except OSError:
        return 0
    if pid == 0:
        _become_supervisor(directory, *handed)
    return pid


def _become_supervisor(directory: str, stdin_fd: int, errors_fd: int) -> None:
    """Become the supervisor. Never returns, because this process must not go on as a second fork server."""
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd, target in ((stdin_fd, 0), (errors_fd, 1), (errors_fd, 2)):
            os.dup2(fd, target)
        os.closerange(3, HIGHEST_DESCRIPTOR)
        importlib.import_module("shoal.runtime.process.kernel").rename(
            (sys.executable, "-m", "shoal.runtime.supervisor", directory)
        )
        status = importlib.import_module("shoal.runtime.supervisor.entry").main([directory])
    except BaseException:  # noqa: BLE001 - printed where an executed supervisor would print it
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


if __name__ == "__main__":
    # msgspec imports typing_extensions where it is installed, for types that nothing here uses.
    sys.modules["typing_extensions"] = None  # type: ignore[assignment]
    for name in LOADED:
        importlib.import_module(name)
    importlib.import_module("shoal.runtime.process.kernel").rename(
        (sys.executable, "-m", "shoal.runtime.process.fork_server")
    )
    gc.freeze()  # so that loaded modules stay shared with every supervisor
    serve(socket.socket(fileno=0))
