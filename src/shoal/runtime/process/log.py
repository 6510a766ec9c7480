"""The task's log: one bounded file with the lines of all ranks.

`LogFile` writes each line with its time, rank and stream. A full disk never blocks the ranks: lines that
cannot be written are counted, and a note says so later.
"""

from __future__ import annotations

import contextlib
import os

from shoal.clock import Clock

MAX_LINE = 65536
REDRAWN_S = 1.0


class LineSplitter:
    """Cuts a byte stream into lines. A line longer than `MAX_LINE` comes in pieces.

    A line that is redrawn with carriage returns, such as a progress bar, also comes in pieces, at most one
    every `REDRAWN_S`, so that a reader need not wait for a newline at the very end.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._shown_at = -REDRAWN_S
        self._fed_at = 0.0
        self._was_cut = False
        """The last piece was cut from an unfinished line, so a newline right after it ends that line."""
        self.is_redrawn = False
        """The unfinished line had a carriage return, so `settled` may return something."""

    def feed(self, chunk: bytes, now: float) -> list[bytes]:
        """Return the lines complete at `now` (monotonic seconds), without their newlines."""
        if self._was_cut and chunk:
            chunk = chunk[1:] if chunk[:1] == b"\n" and not self._rest else chunk
            self._was_cut = False
        self._fed_at = now
        *lines, self._rest = (self._rest + chunk).split(b"\n") if self._rest else chunk.split(b"\n")
        if len(self._rest) >= MAX_LINE or any(len(line) > MAX_LINE for line in lines):
            lines = self._cut(lines)
        self.is_redrawn = b"\r" in self._rest or (self.is_redrawn and not lines)
        if self.is_redrawn and now - self._shown_at >= REDRAWN_S:
            lines += self._take(self._rest.rfind(b"\r") + 1, now)
        return lines

    def settled(self, now: float) -> list[bytes]:
        """Return the last state of a redrawn line if nothing came for `REDRAWN_S`."""
        if not self.is_redrawn or now - self._fed_at < REDRAWN_S:
            return []
        return self._take(len(self._rest), now)

    def _take(self, end: int, now: float) -> list[bytes]:
        """Return the unfinished line up to `end`, or nothing if it shows nothing."""
        if not self._rest[:end].strip():
            return []
        piece, self._rest = self._rest[:end], self._rest[end:]
        self._shown_at, self._was_cut = now, True
        return [piece]

    def finish(self) -> list[bytes]:
        """Return the text after the last newline, if there is any."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []

    def _cut(self, lines: list[bytes]) -> list[bytes]:
        pieces: list[bytes] = []
        for line in lines:
            pieces += [line[at : at + MAX_LINE] for at in range(0, len(line), MAX_LINE)] or [b""]
        while len(self._rest) >= MAX_LINE:
            pieces.append(self._rest[:MAX_LINE])
            self._rest = self._rest[MAX_LINE:]
        return pieces


class LogFile:
    """Appends `UNIXTIME RANK STREAM TEXT` lines. Only one process may write the file."""

    def __init__(self, path: str, max_bytes: int, clock: Clock) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        self._size = os.fstat(self._fd).st_size
        self._max_bytes = max_bytes
        self._clock = clock
        self._is_full = False
        self._num_lost = 0

    def add(self, rank: int | None, stream: str, lines: list[bytes]) -> None:
        """Append lines. Never raises for want of space. After `max_bytes`, lines are dropped."""
        if self._is_full or not lines:
            return
        prefix = self._prefix(rank, stream)
        data = prefix + (b"\n" + prefix).join(lines) + b"\n"
        if self._size + len(data) > self._max_bytes:
            self._fill(data)
        elif not self._append(self._lost_note() + data):
            self._num_lost += len(lines)
        else:
            self._num_lost = 0

    def add_message(self, text: str) -> None:
        """Append a message of Shoal, always as one line."""
        self.add(None, "e", [text.replace("\n", " ").encode()])

    def finish(self) -> bool:
        """Note how many lines were lost, and make the log durable. False: the disk refuses; try again
        later.
        """
        if self._num_lost and not self._append(self._lost_note()):
            return False
        self._num_lost = 0
        try:
            os.fsync(self._fd)
        except OSError:
            return False
        return True

    def _prefix(self, rank: int | None, stream: str) -> bytes:
        return f"{self._clock.now():.6f} {'-' if rank is None else rank} {stream} ".encode()

    def _lost_note(self) -> bytes:
        if not self._num_lost:
            return b""
        note = f"{self._num_lost} lines were lost here: the log could not be written\n"
        return self._prefix(None, "e") + note.encode()

    def _fill(self, data: bytes) -> None:
        """Write the whole lines that still fit, then a note that further lines are dropped."""
        room = max(0, self._max_bytes - self._size)
        fitting = data[: data.rfind(b"\n", 0, room) + 1]
        note = f"the log has reached its limit of {self._max_bytes} bytes; further lines are dropped\n"
        self._is_full = self._append(fitting + self._prefix(None, "e") + note.encode())

    def _append(self, data: bytes) -> bool:
        """Append all of it or nothing, because half a line would be joined to the next one."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            return False
        self._size += len(data)
        return True
