"""Runs a command with a limit on time and on the size of its output. Blocking.

If a command becomes another user's process, that user can stop it, trace it and write its output, which we
keep in memory. Without a limit, the user could use up all of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, NamedTuple

PIECE = 1 << 16
TURN_S = 0.05


class OutputTooLargeError(Exception):
    """The command wrote more than it may, and was killed."""


class CommandResult(NamedTuple):
    code: int
    stdout: str
    """On standard output."""
    stderr: str
    """On standard error until it ended: a process that stays behind may hold that open."""


class _PipeReader:
    """The data of one pipe."""

    def __init__(self, pipe: IO[bytes] | None, max_bytes: int) -> None:
        assert pipe is not None
        self.fd, self._max_bytes = pipe.fileno(), max_bytes
        os.set_blocking(self.fd, False)
        self.data = bytearray()
        self.is_closed = False

    @property
    def text(self) -> str:
        return self.data.decode(errors="replace")  # other users chose names in it

    def read(self) -> None:
        """Read all that is there now."""
        while not self.is_closed:
            try:
                piece = os.read(self.fd, PIECE)
            except BlockingIOError:
                return
            self.is_closed = not piece
            self.data += piece
            if len(self.data) > self._max_bytes:
                raise OutputTooLargeError(f"it said more than {self._max_bytes} bytes")


def run(
    command: Sequence[str],
    stdin: str,
    env: Mapping[str, str],
    *,
    timeout_s: float,
    max_stdout_bytes: int,
    max_stderr_bytes: int,
    in_new_session: bool = False,
) -> CommandResult:
    """Run `command` with `stdin` as its standard input.

    `OutputTooLargeError`, `subprocess.TimeoutExpired`: the process was killed. `OSError`: it was not
    started.
    """
    with (
        _as_file(stdin) as file,
        subprocess.Popen(
            command,
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            start_new_session=in_new_session,
        ) as process,
    ):
        try:
            stdout, stderr = (
                _PipeReader(process.stdout, max_stdout_bytes),
                _PipeReader(process.stderr, max_stderr_bytes),
            )
            _collect_output(process, stdout, stderr, timeout_s)
        except BaseException:
            process.kill()
            raise
    return CommandResult(process.returncode, stdout.text, stderr.text)


def _collect_output(
    process: subprocess.Popen[bytes], stdout: _PipeReader, stderr: _PipeReader, timeout_s: float
) -> None:
    """Read until standard output is closed and the process has ended."""
    deadline = time.monotonic() + timeout_s
    while True:
        is_over = stdout.is_closed and process.poll() is not None
        stdout.read()
        stderr.read()
        if is_over:
            return
        left_s = deadline - time.monotonic()
        if left_s <= 0:  # also of one that says a little all the time
            raise subprocess.TimeoutExpired(process.args, timeout_s, stderr=bytes(stderr.data))
        if stdout.is_closed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(left_s, TURN_S))
        else:
            _await((stdout, stderr), left_s)


def _await(pipes: Sequence[_PipeReader], left_s: float) -> None:
    waiting = select.poll()
    for pipe in pipes:
        if not pipe.is_closed:
            waiting.register(pipe.fd, select.POLLIN)
    waiting.poll(left_s * 1000)


@contextlib.contextmanager
def _as_file(text: str) -> Iterator[int]:
    """Yield a file with the text, sealed because a process that reads it could also write it."""
    fd = os.memfd_create("given", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(fd, "wb") as file:
        file.write(text.encode())
        file.seek(0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        yield fd
