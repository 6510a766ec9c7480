"""Run a command and hear no more of it than it may say. Blocking.

A command that becomes somebody else's process is theirs to stop, to trace and to write for, and what it says
is kept in our memory: without a bound they could use up all of it.
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


class TooMuchError(Exception):
    """It said more than it may, and was killed."""


class Done(NamedTuple):
    code: int
    told: str
    """On standard output."""
    said: str
    """On standard error, until it ended: who stays behind may hold that open."""


class _Heard:
    """What came by one pipe."""

    def __init__(self, pipe: IO[bytes] | None, most: int) -> None:
        assert pipe is not None
        self.fd, self._most = pipe.fileno(), most
        os.set_blocking(self.fd, False)
        self.data = bytearray()
        self.is_closed = False

    @property
    def text(self) -> str:
        return self.data.decode(errors="replace")  # of names that others gave

    def read(self) -> None:
        """All that is there now."""
        while not self.is_closed:
            try:
                piece = os.read(self.fd, PIECE)
            except BlockingIOError:
                return
            self.is_closed = not piece
            self.data += piece
            if len(self.data) > self._most:
                raise TooMuchError(f"it said more than {self._most} bytes")


def run(
    words: Sequence[str],
    given: str,
    env: Mapping[str, str],
    *,
    timeout_s: float,
    most_told: int,
    most_said: int,
    in_new_session: bool = False,
) -> Done:
    """`given`: its standard input. `most_told`, `most_said`: bytes, of standard output and error.

    `TooMuchError`, `subprocess.TimeoutExpired`: the process is gone. `OSError`: there was none.
    """
    with (
        _as_file(given) as file,
        subprocess.Popen(
            words,
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            start_new_session=in_new_session,
        ) as process,
    ):
        try:
            told, said = _Heard(process.stdout, most_told), _Heard(process.stderr, most_said)
            _hear(process, told, said, timeout_s)
        except BaseException:
            process.kill()
            raise
    return Done(process.returncode, told.text, said.text)


def _hear(process: subprocess.Popen[bytes], told: _Heard, said: _Heard, timeout_s: float) -> None:
    """Until its standard output is closed and it has ended."""
    deadline = time.monotonic() + timeout_s
    while True:
        is_over = told.is_closed and process.poll() is not None
        told.read()
        said.read()
        if is_over:
            return
        left_s = deadline - time.monotonic()
        if left_s <= 0:  # also of one that says a little all the time
            raise subprocess.TimeoutExpired(process.args, timeout_s, stderr=bytes(said.data))
        if told.is_closed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(left_s, TURN_S))
        else:
            _await((told, said), left_s)


def _await(pipes: Sequence[_Heard], left_s: float) -> None:
    waiting = select.poll()
    for one in pipes:
        if not one.is_closed:
            waiting.register(one.fd, select.POLLIN)
    waiting.poll(left_s * 1000)


@contextlib.contextmanager
def _as_file(text: str) -> Iterator[int]:
    """To be read from its beginning. Sealed: whoever reads it could write, too."""
    fd = os.memfd_create("given", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(fd, "wb") as file:
        file.write(text.encode())
        file.seek(0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        yield fd
