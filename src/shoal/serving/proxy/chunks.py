"""Find where a chunked body ends. Strict: framing that another reader might read differently is refused.

The bytes are passed on as they came, so a body costs no copy. Trailers are not passed on.
"""

from __future__ import annotations

import re

SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[\t !-~\x80-\xff]{0,200})?\r\n")
SIZE_BEGUN = re.compile(rb"[0-9A-Fa-f]{0,15}(?:[ \t]*(?:;[\t !-~\x80-\xff]*)?)?\r?")
TRAILERS = re.compile(rb"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t !-~\x80-\xff]*\r\n)*\r\n")
MAX_LINE = 256
"""Limit of a size line with its extensions."""
MAX_TRAILERS = 8192
LAST_CHUNK = b"0\r\n\r\n"
BARE_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})\r\n")
BARE_SIZE_BEGUN = re.compile(rb"[0-9A-Fa-f]{0,15}\r?")


def _single_chunk_prefix(length: int) -> bytes:
    """Return how a piece of that length begins if it is one chunk with the plainest size; `?` if it cannot
    be.
    """
    for digits in range(1, 5):
        line = b"%x\r\n" % max(0, length - digits - 4)
        if len(line) == digits + 2 and not line.startswith(b"0"):
            return line
    return b"?"


MAX_SINGLE_CHUNK = 2048
SINGLE_CHUNK_PREFIXES = [_single_chunk_prefix(length) for length in range(MAX_SINGLE_CHUNK)]
"""Prefixes by length. Stream events mostly come one in a piece; this check takes a third of the parsing
time."""


class BadChunk(ValueError):
    """The framing is broken. Nothing after it on the connection means anything."""


class Chunks:
    """One body. Between two pieces it holds at most an unfinished line or the trailers."""

    __slots__ = ("_held", "_is_ending", "_left", "count")
    _size, _size_begun, _max_trailers = SIZE, SIZE_BEGUN, MAX_TRAILERS

    def __init__(self) -> None:
        self._held = b""
        self._left = 0
        """Bytes left of the chunk being read, its closing line end included."""
        self._is_ending = False
        self.count = 0

    @property
    def is_ending(self) -> bool:
        """Whether only trailers and the empty line after them are left."""
        return self._is_ending

    def is_one(self, data: bytes) -> bool:
        """Return whether a piece is exactly one chunk. If so it is counted, and may be passed on as it is."""
        length = len(data)
        if (
            length < MAX_SINGLE_CHUNK
            and data.startswith(SINGLE_CHUNK_PREFIXES[length])
            and data.endswith(b"\r\n")
            and not (self._left or self._held or self._is_ending)
        ):
            self.count += 1
            return True
        return False

    def feed(self, data: bytes, decoded: list[bytes] | None = None) -> tuple[bytes, bytes | None]:
        """Return the bytes to pass on as they are and, once the body is over, what came after it.

        The last chunk is not included: the code that passes the body on ends it. The contents of the chunks
        are appended to `decoded`. `BadChunk`: nothing of this piece may be passed on.
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
        """Advance to the end of the chunk, or of the data. A partial line end stays in the data."""
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
        """Return what follows the trailers, or None while they are not over."""
        trailers = TRAILERS.match(data)
        if trailers is not None and trailers.end() <= self._max_trailers:
            return data[trailers.end() :]
        if len(data) > self._max_trailers or b"\r\n\r\n" in data:
            raise BadChunk("trailers are malformed or too long")
        self._held = data
        return None


class BareChunks(Chunks):
    """A body whose chunks have no extensions and that ends without trailers. Others raise `BadChunk`."""

    __slots__ = ()
    _size, _size_begun, _max_trailers = BARE_SIZE, BARE_SIZE_BEGUN, len(b"\r\n")
