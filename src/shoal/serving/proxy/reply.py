"""Heads of replies: which headers are passed on, and how the body is framed. Pure.

Parsing is as strict as with requests: a replica must not be able to make two replies out of one on a
caller's connection.

Two kinds of replies are rewritten: for callers of HTTP/1.0, and for callers that asked for a stream while a
service starts. The latter get the head at once and a comment every `HEARTBEAT_S` seconds, so that no proxy
on the way takes the silence for a dead connection.
"""

from __future__ import annotations

import re

import httptools
import msgspec

from shoal.serving.proxy.chunks import LAST_CHUNK, Chunks
from shoal.serving.proxy.request_head import CHUNKED, MAX_LENGTH, is_loose

MAX_HEAD_BYTES = 64 << 10
UNTIL_CLOSE = -2
"""A length, besides `CHUNKED`."""

STAYS_HERE = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"content-length",
        b"x-request-id",
    }
)
"""Headers that concern one connection only, and those that the data plane writes itself."""


class BadProxyReply(ValueError):
    """A reply that cannot be passed on. Its connection is of no more use."""


class ProxyReply(msgspec.Struct, frozen=True, kw_only=True):
    status: int
    length: int
    """The length that its headers say, whatever the request was."""
    has_body: bool
    """Whether a reply of this status has a body."""
    is_keep_alive: bool
    is_stream: bool
    """An event stream."""
    head: bytes
    """Status line and headers to pass on, without framing."""
    framing: bytes
    """Headers that frame the body as it comes."""
    upgrade: bytes
    """Headers to pass on with 101."""
    start: bytes
    """`head` and `framing`, up to the request's id."""
    has_cors: bool
    """The program itself says which web pages may read it."""


class _Lines:
    __slots__ = ("headers", "is_whole", "reason")

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.reason = b""
        self.is_whole = False

    def on_status(self, reason: bytes) -> None:
        self.reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        self.is_whole = True


def parse_reply(raw: bytes) -> ProxyReply:
    """Parse the head in `raw`, which ends with its empty line."""
    if is_loose(raw) or not raw.startswith((b"HTTP/1.1 ", b"HTTP/1.0 ")):
        raise BadProxyReply("the head of the response is malformed")
    lines = _Lines()
    parser = httptools.HttpResponseParser(lines)
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError as error:
        raise BadProxyReply(f"the head of the response cannot be read: {error}") from None
    status = parser.get_status_code()
    if not lines.is_whole or not 100 <= status <= 599:
        raise BadProxyReply(f"the response's status is {status}")
    return _checked_reply(status, lines, is_http10=raw.startswith(b"HTTP/1.0"))


def _checked_reply(status: int, lines: _Lines, *, is_http10: bool) -> ProxyReply:
    values: dict[bytes, list[bytes]] = {}
    for name, value in lines.headers:
        values.setdefault(name, []).append(value)
    named = {
        option.strip().lower() for value in values.get(b"connection", []) for option in value.split(b",")
    }
    length, framing = _framing(values, is_http10=is_http10)
    has_body = status >= 200 and status not in {204, 304}
    if status < 200 or status == 204:
        framing = b""
    passed_on = [
        b"%b: %b\r\n" % (name, value)
        for name, value in lines.headers
        if name not in STAYS_HERE and name not in named and not name.startswith(b"x-shoal-")
    ]
    upgrade = values.get(b"upgrade", [b""])[0]
    head = b"HTTP/1.1 %d %b\r\n%b" % (status, lines.reason, b"".join(passed_on))
    return ProxyReply(
        status=status,
        length=length if has_body else 0,
        has_body=has_body,
        is_keep_alive=b"close" not in named and not is_http10 and (length != UNTIL_CLOSE or not has_body),
        is_stream=values.get(b"content-type", [b""])[0].lower().startswith(b"text/event-stream"),
        head=head,
        framing=framing,
        upgrade=b"connection: upgrade\r\nupgrade: %b\r\n" % upgrade if status == 101 else b"",
        start=b"%b%bx-request-id: " % (head, framing),
        has_cors=b"access-control-allow-origin" in values,
    )


def _framing(values: dict[bytes, list[bytes]], *, is_http10: bool) -> tuple[int, bytes]:
    lengths, codings = values.get(b"content-length", []), values.get(b"transfer-encoding", [])
    if codings:
        if lengths or is_http10 or len(codings) > 1 or codings[0].lower() != b"chunked":
            raise BadProxyReply("the response is framed in more than one way, or in an unknown one")
        return CHUNKED, b"transfer-encoding: chunked\r\n"
    if not lengths:
        return UNTIL_CLOSE, b""
    if len(lengths) > 1 or not lengths[0].isdigit() or len(lengths[0]) > 18 or int(lengths[0]) > MAX_LENGTH:
        raise BadProxyReply("the response's Content-Length is not one whole number")
    return int(lengths[0]), b"content-length: %b\r\n" % lengths[0]


WANTS_STREAM = re.compile(rb'"stream"\s*:\s*true')
HEARTBEAT_S = 10.0
MAX_ERROR_BYTES = 64 << 10


class ReplyRewriter:
    """Rewrites for HTTP/1.0: the body without chunks, ended by closing the connection."""

    def __init__(self) -> None:
        self._chunks: Chunks | None = None

    def head(self, reply: ProxyReply, request_id: bytes) -> bytes:
        self._chunks = Chunks() if reply.length == CHUNKED else None
        return b"%bx-request-id: %b\r\nconnection: close\r\n\r\n" % (reply.head, request_id)

    def data(self, raw: bytes) -> bytes:
        if self._chunks is None:
            return raw
        pieces: list[bytes] = []
        self._chunks.feed(raw, pieces)
        return b"".join(pieces)

    def end(self) -> bytes:
        return b""


class WarmingStream(ReplyRewriter):
    """Rewrites for event streams whose head went out before a replica was ready."""

    def __init__(self) -> None:
        super().__init__()
        self._error: list[bytes] | None = None

    def begin(self, request_id: bytes) -> bytes:
        return (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-store\r\n"
            b"transfer-encoding: chunked\r\nx-request-id: %b\r\n\r\n" % request_id
        )

    def heartbeat(self) -> bytes:
        return _chunk(b": warming\n\n")

    def head(self, reply: ProxyReply, request_id: bytes) -> bytes:
        super().head(reply, request_id)
        if not reply.is_stream or reply.status != 200:
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
        return LAST_CHUNK if self._error is None else self.error_event(b"".join(self._error))

    def error_event(self, document: bytes) -> bytes:
        """Return the stream's last event, with what would have been the body of an error."""
        lines = b"".join(b"data: %b\n" % line for line in document.splitlines())
        return _chunk(b"event: error\n%b\n" % lines) + LAST_CHUNK


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
