"""The only file of this engine that starts a process or opens a socket."""

# The spool names its files by strings: a supervisor starts without pathlib.
# ruff: noqa: PTH123

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import subprocess
import threading
from collections.abc import Collection, Mapping

FIRST_PORT = 20_000
NUM_PORTS = 10_000
"""Below Linux's ephemeral ports (32768 on), which any outgoing connection may take at any time."""
PIPE_SIZE = 64 << 10
WORDS_S = 20.0


class Children:
    """The supervisors this process started. They need no parent; we only keep them from becoming zombies."""

    def __init__(self) -> None:
        self._pids: set[int] = set()
        self._guard = threading.Lock()

    def spawn(
        self, command: list[str], environment: Mapping[str, str], errors_path: str, given: bytes
    ) -> int:
        """Start `command` in a session of its own with `given` on its standard input; its pid.

        `OSError`: it was not started. Never blocks on the child: what it is given fits in the pipe, or
        nothing is started.
        """
        with contextlib.ExitStack() as stack:
            reader, writer = os.pipe()
            stack.callback(os.close, reader)
            with open(writer, "wb", buffering=0) as pipe:
                _fill(pipe.fileno(), given)
            # O_APPEND: a second supervisor of the share must not overwrite what the first one said.
            errors = os.open(errors_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
            stack.callback(os.close, errors)
            process = subprocess.Popen(
                command,
                stdin=reader,
                stdout=errors,
                stderr=errors,
                cwd="/",
                env=dict(environment),
                start_new_session=True,
            )
        with self._guard:
            self._pids.add(process.pid)
        # We wait for it by pid. Left alone, a Popen warns when it is dropped before its child ends.
        process.returncode = 0
        return process.pid

    def reap(self) -> None:
        """Collect those that ended. Never blocks."""
        with self._guard:
            self._pids = {pid for pid in self._pids if _lives(pid)}

    def is_running(self, pid: int) -> bool:
        """Whether `pid` is a child of ours that has not ended."""
        self.reap()
        with self._guard:
            return pid in self._pids


def _fill(writer: int, given: bytes) -> None:
    """Put all of `given` in the pipe, or raise `OSError` rather than wait for a reader."""
    if len(given) > PIPE_SIZE:
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, len(given))
    os.set_blocking(writer, False)
    if given and os.write(writer, given) < len(given):
        raise OSError(errno.ENOBUFS, "the credentials do not fit in a pipe")


def _lives(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == 0
    except ChildProcessError:
        return False


def read_words(command: list[str], environment: Mapping[str, str]) -> tuple[tuple[str, ...], str]:
    """The words a short command prints, and why there are none where it failed."""
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            cwd="/",
            capture_output=True,
            timeout=WORDS_S,
            check=True,
            text=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", None) or str(error)
        return (), str(told).strip().splitlines()[-1]
    return tuple(done.stdout.split()), ""


def free_port(address: str, taken: Collection[int], start: int) -> int:
    """A port that can be bound now and is not among `taken`, looked for from `start` on.

    Nothing keeps it free afterwards: `taken` must name the ports promised to attempts that still run.
    """
    for step in range(NUM_PORTS):
        port = FIRST_PORT + (start + step) % NUM_PORTS
        if port not in taken and _can_bind(address, port):
            return port
    raise OSError(errno.EADDRINUSE, f"all {NUM_PORTS} ports from {FIRST_PORT} on are taken")


def _can_bind(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True
