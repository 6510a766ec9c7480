"""Heads of requests: what they ask for and how their bodies are framed. Pure; strict where readers differ.

llhttp splits the lines. This module adds the rules that leave a head only one meaning: no bare line feeds or
carriage returns, no folded lines, one Host, one framing.
"""

from __future__ import annotations

import re

import httptools
import msgspec

from shoal.serving.proxy.local_reply import ProxyRefusal, malformed

MAX_HEAD_BYTES = 32 << 10
MAX_TARGET_BYTES = 8 << 10
MAX_HEADERS = 100
MAX_LENGTH = 1 << 50

CHUNKED = -1
"""A length."""

REQUEST_LINE = re.compile(rb"[A-Z-]{1,24} ([!-~]+) HTTP/1\.[01]\r\n")
WITH_QUERY = re.compile(rb"[A-Z-]{1,24} [!-\"$->@-~]+(\?[!-\"$-~]*) HTTP/1\.[01]\r\n")
"""A request line whose query may be cut out: any other fault is still found in the line without it."""
LOOSE_LINES = re.compile(rb"(?<!\r)\n|\r(?!\n)|\n[ \t]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
LOOSE_SO_FAR = re.compile(LOOSE_LINES.pattern.replace(rb"\r(?!\n)", rb"\r(?!\n|\Z)"))
"""The same for a head that may continue after its last byte."""
PLAIN = bytes(byte for byte in range(256) if byte == 9 or (byte >= 32 and byte != 127))
"""Bytes allowed within lines."""
HOST = re.compile(rb"(?:[A-Za-z0-9_](?:[A-Za-z0-9_.-]*)|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")
ABSOLUTE = re.compile(rb"https?://([^/?#]*)(.*)", re.IGNORECASE)
DOTS = re.compile(rb"/(?:\.|%2e){1,2}(?:/|%2f|\\|%5c|;|$)", re.IGNORECASE)
REFUSED_METHODS = frozenset({b"CONNECT", b"TRACE"})


def is_loose(raw: bytes) -> bool:
    """Return whether `LOOSE_LINES` finds anything in a whole head, in a fifth of its time."""
    ends = raw.translate(None, PLAIN)
    return ends != b"\r\n" * raw.count(b"\r\n") or b"\n " in raw or b"\n\t" in raw


class RequestHead(msgspec.Struct, frozen=True, kw_only=True):
    method: bytes
    target: bytes
    """Path and query; never absolute."""
    host: bytes
    """In lower case, without the port."""
    headers: tuple[tuple[bytes, bytes], ...]
    """Names in lower case, in the order they came."""
    length: int
    """Length of the body; `CHUNKED` if only its end will show it."""
    is_keep_alive: bool
    is_http10: bool
    is_expecting: bool
    """Waits for `100 Continue` before it sends the body."""
    is_websocket: bool
    options: frozenset[bytes]
    """Headers named by `Connection`, which end at this hop."""

    def value(self, name: bytes) -> bytes:
        """Return the first header of that name, or an empty value."""
        return next((value for seen, value in self.headers if seen == name), b"")


class _Lines:
    """Callbacks for llhttp."""

    __slots__ = ("headers", "is_whole", "target")

    def __init__(self) -> None:
        self.target = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_whole = False

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        self.is_whole = True


def parse_head(raw: bytes) -> RequestHead:
    """Parse the head in `raw`, which ends with its empty line. `ProxyRefusal`: the reply to its sender."""
    if len(raw) > MAX_HEAD_BYTES:
        raise _too_long()
    if is_loose(raw):
        raise malformed("the head has a control character, a bare line end or a folded line")
    line = REQUEST_LINE.match(raw)
    if line is None:
        raise malformed("the request line is not METHOD TARGET HTTP/1.1")
    if len(line[1]) > MAX_TARGET_BYTES:
        raise ProxyRefusal(
            414, "request.target", f"the target is longer than {MAX_TARGET_BYTES} bytes", must_close=True
        )
    lines = _Lines()
    parser = httptools.HttpRequestParser(lines)
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass  # a head with Upgrade is whole; the data plane decides what may follow it
    except httptools.HttpParserError as error:
        raise malformed(f"the head cannot be read: {error}") from None
    if not lines.is_whole:
        raise malformed("the head cannot be read: it has no end")
    return _checked_head(parser.get_method(), lines, is_http10=raw[line.end() - 3 : line.end() - 2] == b"0")


def without_query(raw: bytes) -> tuple[bytes, bytes]:
    """Return the head without the query of its target, and the query with its `?`, or empty.

    What decides about a request is in the path, so requests that differ only in the query share one parsed
    head.
    """
    line = WITH_QUERY.match(raw) if b"?" in raw else None
    if line is None:
        return raw, b""
    start, end = line.span(1)
    return raw[:start] + raw[end:], raw[start:end]


def too_large(seen: bytes, num_checked: int = 0) -> ProxyRefusal | None:
    """Return the refusal of an unfinished head that can only get worse, or None.

    The first `num_checked` bytes were checked before, so a head that comes byte by byte is not read
    repeatedly.
    """
    if len(seen) > MAX_HEAD_BYTES:
        return _too_long()
    return (
        malformed("the head has a bare line end")
        if LOOSE_SO_FAR.search(seen, max(0, num_checked - 2)) is not None
        else None
    )


def _too_long() -> ProxyRefusal:
    detail = f"the head is longer than {MAX_HEAD_BYTES} bytes"
    return ProxyRefusal(431, "request.head", detail, must_close=True)


def _checked_head(method: bytes, lines: _Lines, *, is_http10: bool) -> RequestHead:
    headers = lines.headers
    if len(headers) > MAX_HEADERS:
        detail = f"{len(headers)} headers; at most {MAX_HEADERS} are read"
        raise ProxyRefusal(431, "request.head", detail, must_close=True)
    if method in REFUSED_METHODS:
        raise ProxyRefusal(405, "request.method", f"{method.decode()} is not served", must_close=True)
    values: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        values.setdefault(name, []).append(value)
    options = frozenset(
        option.strip().lower() for value in values.get(b"connection", []) for option in value.split(b",")
    )
    if len(values.get(b"authorization", [])) > 1:
        raise malformed("more than one Authorization")  # a proxy in front may use the other
    target, host = _target_and_host(lines.target, values.get(b"host", []), is_http10=is_http10)
    expects = values.get(b"expect", [])
    if expects and (len(expects) > 1 or expects[0].lower() != b"100-continue"):
        raise ProxyRefusal(417, "request.expect", "only `100-continue` can be expected", must_close=True)
    length = _length(values, is_http10=is_http10)
    upgrades = [value.lower() for value in values.get(b"upgrade", [])]
    return RequestHead(
        method=method,
        target=target,
        host=host,
        headers=tuple(headers),
        length=length,
        is_keep_alive=not is_http10 and b"close" not in options,
        is_http10=is_http10,
        is_expecting=bool(expects) and not is_http10 and length != 0,
        is_websocket=upgrades == [b"websocket"]
        and b"upgrade" in options
        and method == b"GET"
        and length == 0
        and not is_http10,
        options=options,
    )


def _length(values: dict[bytes, list[bytes]], *, is_http10: bool) -> int:
    lengths, codings = values.get(b"content-length", []), values.get(b"transfer-encoding", [])
    if codings:
        if lengths or is_http10 or len(codings) > 1:
            raise malformed("the body is framed in more than one way")
        if codings[0].lower() != b"chunked":
            raise ProxyRefusal(
                501, "request.coding", "the only transfer coding read is `chunked`", must_close=True
            )
        return CHUNKED
    if not lengths:
        return 0
    if len(lengths) > 1 or not lengths[0].isdigit() or len(lengths[0]) > 18:
        raise malformed("Content-Length is not one whole number")
    length = int(lengths[0])
    if length > MAX_LENGTH:
        raise ProxyRefusal(
            413, "request.length", f"the body is longer than {MAX_LENGTH} bytes", must_close=True
        )
    return length


def _target_and_host(target: bytes, hosts: list[bytes], *, is_http10: bool) -> tuple[bytes, bytes]:
    """Return the path with its query, and the host. An absolute target must name the same host as Host."""
    if len(hosts) > 1 or (not hosts and not is_http10):
        raise malformed(f"one Host is needed, {len(hosts)} seen")
    host = hosts[0] if hosts else b""
    if hosts and HOST.fullmatch(host) is None:
        raise malformed("Host is not a name or an address with an optional port")
    absolute = ABSOLUTE.fullmatch(target)
    if absolute is not None:
        if absolute[1].lower() != host.lower():
            raise malformed("the target and Host name different hosts")
        target = absolute[2] if absolute[2].startswith(b"/") else b"/" + absolute[2]
    if not target.startswith(b"/") or b"#" in target:
        raise malformed("the target is not a path")
    if DOTS.search(target.partition(b"?")[0]) is not None:
        raise malformed("the path has dot segments; send it resolved")
    name = host.lower()
    return target, name if name.endswith(b"]") else name.rpartition(b":")[0] or name
