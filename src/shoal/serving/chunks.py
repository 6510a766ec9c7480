"""Where a chunked body ends. Strict: what another reader might take for something else is refused.

The bytes themselves go on as they came, so a body costs no copy; trailers stay here.
"""

from __future__ import annotations

import re

SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[\t !-~\x80-\xff]{0,200})?\r\n")
SIZE_BEGUN = re.compile(rb"[0-9A-Fa-f]{0,15}(?:[ \t]*(?:;[\t !-~\x80-\xff]*)?)?\r?")
TRAILERS = re.compile(rb"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t !-~\x80-\xff]*\r\n)*\r\n")
MAX_LINE = 256
"""Of a size and its extensions."""
MAX_TRAILERS = 8192
LAST = b"0\r\n\r\n"
BARE_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})\r\n")
BARE_SIZE_BEGUN = re.compile(rb"[0-9A-Fa-f]{0,15}\r?")


def _alone(length: int) -> bytes:
    """How a piece of that length begins if it is one chunk with the plainest of sizes; a mark if none is."""
    for digits in range(1, 5):
        line = b"%x\r\n" % max(0, length - digits - 4)
        if len(line) == digits + 2 and not line.startswith(b"0"):
            return line
    return b"?"


MAX_ALONE = 2048
ALONE = [_alone(length) for length in range(MAX_ALONE)]
"""By length. Events of a stream mostly come one in a piece: so seen in a third of the time reading takes."""


class BadChunk(ValueError):
    """The framing is broken: nothing after it on the connection means anything."""


class Chunks:
    """One body. Holds at most an unfinished line or the trailers between two pieces."""

    __slots__ = ("_held", "_is_ending", "_left", "count")
    _size, _size_begun, _max_trailers = SIZE, SIZE_BEGUN, MAX_TRAILERS

    def __init__(self) -> None:
        self._held = b""
        self._left = 0
        """Of the chunk being read, its closing line end included."""
        self._is_ending = False
        self.count = 0

    @property
    def is_ending(self) -> bool:
        """Whether only trailers and the empty line after them are left."""
        return self._is_ending

    def is_one(self, data: bytes) -> bool:
        """Whether a piece is one chunk and nothing else; then it is taken, and may go on as it is."""
        length = len(data)
        if (
            length < MAX_ALONE
            and data.startswith(ALONE[length])
            and data.endswith(b"\r\n")
            and not (self._left or self._held or self._is_ending)
        ):
            self.count += 1
            return True
        return False

    def feed(self, data: bytes, decoded: list[bytes] | None = None) -> tuple[bytes, bytes | None]:
        """What may go on as it is, and, once the body is over, what came after it.

        The last chunk is not among the former: whoever passes the body on ends it. What the chunks contain
        is appended to `decoded`. `BadChunk`: see there; nothing of this piece may go on.
        """
        if decoded is None and self.is_one(data):
            return data, None
        if self._held:
            data = self._held + data
            self._held = b""
        at, end = 0, len(data)
        while not self._is_ending:
            if self._left:
                at = self._inside(data, at, end, decoded)
                if self._left:
                    return self._wait(data, at)
            line = self._size.match(data, at)
            if line is None:
                if end - at > MAX_LINE or self._size_begun.fullmatch(data, at) is None:
                    raise BadChunk(f"chunk size expected, {data[at : at + 16]!r} seen")
                return self._wait(data, at)
            size = int(line[1], 16)
            if size:
                at = line.end()
                self._left = size + 2
                self.count += 1
            else:
                self._is_ending = True
                return data[:at], self._end(data[line.end() :])
        return b"", self._end(data)

    def _inside(self, data: bytes, at: int, end: int, decoded: list[bytes] | None) -> int:
        """Goes on to the end of the chunk, or as far as there are bytes; a part of the line end is left."""
        left = self._left
        stop = at + left - 2
        if decoded is not None and at < stop:
            decoded.append(data[at : min(stop, end)])
        if end < stop:
            self._left = left - (end - at)
            return end
        if data[stop : stop + 2] == b"\r\n":
            self._left = 0
            return stop + 2
        if end - stop >= 2 or data[stop:end] not in {b"", b"\r"}:
            raise BadChunk(f"line end expected after a chunk, {data[stop : stop + 2]!r} seen")
        self._left = 2
        return stop

    def _wait(self, data: bytes, at: int) -> tuple[bytes, None]:
        self._held = data[at:]
        return data[:at], None

    def _end(self, data: bytes) -> bytes | None:
        """What follows the trailers; None while they are not over."""
        trailers = TRAILERS.match(data)
        if trailers is not None and trailers.end() <= self._max_trailers:
            return data[trailers.end() :]
        if len(data) > self._max_trailers or b"\r\n\r\n" in data:
            raise BadChunk("trailers are malformed or too long")
        self._held = data
        return None


class BareChunks(Chunks):
    """A body whose chunks have no extensions and that ends without trailers; others are `BadChunk`."""

    __slots__ = ()
    _size, _size_begun, _max_trailers = BARE_SIZE, BARE_SIZE_BEGUN, len(b"\r\n")
