"""Heads of responses: what is passed on of them and how their bodies are framed. Pure.

As strict as with requests: a replica must not be able to make two answers of one on a caller's connection.
"""

from __future__ import annotations

import httptools
import msgspec

from shoal.serving.head import CHUNKED, MAX_LENGTH, is_loose

MAX_HEAD_BYTES = 64 << 10
UNTIL_CLOSE = -2
"""As a length, beside `CHUNKED`."""

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
"""Headers between two neighbours, and those the data plane writes itself."""


class BadAnswer(ValueError):
    """A response that cannot be passed on; the connection it came on is of no more use."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    status: int
    length: int
    """As its headers say, whatever the request was."""
    has_body: bool
    """By its status."""
    is_keep_alive: bool
    is_stream: bool
    """Of events."""
    head: bytes
    """Status line and headers to pass on, without framing."""
    framing: bytes
    """Headers that frame the body as it comes."""
    upgrade: bytes
    """To pass on with 101."""
    start: bytes
    """`head` and `framing`, up to the request's id."""
    has_cors: bool
    """The program says itself which web pages may read it."""


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


def parse_answer(raw: bytes) -> Answer:
    """The head in `raw`, which ends with its empty line."""
    if is_loose(raw) or not raw.startswith((b"HTTP/1.1 ", b"HTTP/1.0 ")):
        raise BadAnswer("the head of the response is malformed")
    lines = _Lines()
    parser = httptools.HttpResponseParser(lines)
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError as error:
        raise BadAnswer(f"the head of the response cannot be read: {error}") from None
    status = parser.get_status_code()
    if not lines.is_whole or not 100 <= status <= 599:
        raise BadAnswer(f"the response's status is {status}")
    return _judged(status, lines, is_http10=raw.startswith(b"HTTP/1.0"))


def _judged(status: int, lines: _Lines, *, is_http10: bool) -> Answer:
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
    kept = [
        b"%b: %b\r\n" % (name, value)
        for name, value in lines.headers
        if name not in STAYS_HERE and name not in named and not name.startswith(b"x-shoal-")
    ]
    upgrade = values.get(b"upgrade", [b""])[0]
    head = b"HTTP/1.1 %d %b\r\n%b" % (status, lines.reason, b"".join(kept))
    return Answer(
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
            raise BadAnswer("the response is framed in more than one way, or in one nobody reads")
        return CHUNKED, b"transfer-encoding: chunked\r\n"
    if not lengths:
        return UNTIL_CLOSE, b""
    if len(lengths) > 1 or not lengths[0].isdigit() or len(lengths[0]) > 18 or int(lengths[0]) > MAX_LENGTH:
        raise BadAnswer("the response's Content-Length is not one whole number")
    return int(lengths[0]), b"content-length: %b\r\n" % lengths[0]
