"""Responses that do not go on as they come: to callers told to wait, and to callers of HTTP/1.0.

Who asked for a stream while a service starts gets its head at once and a comment now and then, so that
nobody on the way takes the silence for death.
"""

from __future__ import annotations

import re

from shoal.serving.answer import Answer
from shoal.serving.chunks import LAST, Chunks
from shoal.serving.head import CHUNKED

WANTS_STREAM = re.compile(rb'"stream"\s*:\s*true')
EVERY_S = 10.0
MAX_ERROR_BYTES = 64 << 10


class Relay:
    """For HTTP/1.0: the body without chunks, ended by closing the connection."""

    def __init__(self) -> None:
        self._chunks: Chunks | None = None

    def head(self, answer: Answer, request_id: bytes) -> bytes:
        self._chunks = Chunks() if answer.length == CHUNKED else None
        return b"%bx-request-id: %b\r\nconnection: close\r\n\r\n" % (answer.head, request_id)

    def data(self, raw: bytes) -> bytes:
        if self._chunks is None:
            return raw
        pieces: list[bytes] = []
        self._chunks.feed(raw, pieces)
        return b"".join(pieces)

    def end(self) -> bytes:
        return b""


class Warm(Relay):
    """For streams of events: the head went out before any replica was there."""

    def __init__(self) -> None:
        super().__init__()
        self._error: list[bytes] | None = None

    def begin(self, request_id: bytes) -> bytes:
        return (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-store\r\n"
            b"transfer-encoding: chunked\r\nx-request-id: %b\r\n\r\n" % request_id
        )

    def beat(self) -> bytes:
        return _chunk(b": warming\n\n")

    def head(self, answer: Answer, request_id: bytes) -> bytes:
        super().head(answer, request_id)
        if not answer.is_stream or answer.status != 200:
            self._error = []
        return b""

    def data(self, raw: bytes) -> bytes:
        body = super().data(raw)
        if self._error is None:
            return _chunk(body) if body else b""
        if sum(map(len, self._error)) < MAX_ERROR_BYTES:
            self._error.append(body)
        return b""

    def end(self) -> bytes:
        return LAST if self._error is None else self.failed(b"".join(self._error))

    def failed(self, document: bytes) -> bytes:
        """The stream's last event: what would have been the body of an error."""
        lines = b"".join(b"data: %b\n" % line for line in document.splitlines())
        return _chunk(b"event: error\n%b\n" % lines) + LAST


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
