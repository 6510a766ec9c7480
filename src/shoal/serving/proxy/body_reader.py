"""The body of one request as it comes from its caller: where it ends, and whether it comes too slowly."""

from __future__ import annotations

from shoal.serving.proxy.chunks import Chunks
from shoal.serving.proxy.request_head import CHUNKED

BODY_S = 20.0
"""Interval of body checks: a body must have grown by `BODY_RATE` bytes for each second."""
BODY_RATE = 64


class BodyReader:
    __slots__ = ("_chunks", "_left", "_num_grown")

    def __init__(self, length: int) -> None:
        """`length` may be `CHUNKED`."""
        self._chunks = Chunks() if length == CHUNKED else None
        self._left = length
        """Bytes left of a body that has a length."""
        self._num_grown = 0
        """Bytes that came since the last check."""

    def feed(self, data: bytes) -> tuple[bytes, bytes | None]:
        """Return the bytes that belong to the body and, once it is over, what came after it. `BadChunk`: its
        framing is broken.
        """
        if self._chunks is not None:
            ready, rest = self._chunks.feed(data)
        else:
            ready, rest = self._feed_counted(data)
        self._num_grown += len(ready)  # extensions and trailers that drip in do not count
        return ready, rest

    def _feed_counted(self, data: bytes) -> tuple[bytes, bytes | None]:
        left = self._left
        if len(data) < left:
            self._left = left - len(data)
            return data, None
        self._left = 0
        return data[:left], data[left:]

    def has_grown(self) -> bool:
        """Return whether enough has come since the last call. Chunks may be a conversation, so it is enough
        that they come.
        """
        wanted = BODY_RATE * BODY_S if self._chunks is None else 1
        num_grown, self._num_grown = self._num_grown, 0
        return num_grown >= wanted
