"""HTTP/1.1 over one socket, as far as a client of Shoal needs it: a request and its reply.

The standard library's `http.client` costs every command 20 ms, most of it for `email` and `ssl`
(docs/decisions/0002). No redirects, no pipelining, and only the reply headers that say where it ends.

`error_from` turns problem documents (RFC 9457) back into the error that the server raised.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from functools import cache
from typing import IO, Any

from shoal import errors
from shoal.errors import ShoalError, SpecError

BLOCK = 64 << 10
MAX_LINE = 64 << 10
MAX_HEADERS = 200
MAX_BODY_LINE = 4 << 20


class BadHttpReply(OSError):
    """The reply is not HTTP/1.1, or it is cut off."""


class HttpConnection:
    """One kept-alive connection. After an `OSError` it must not be used again."""

    def __init__(self, link: socket.socket, host: str) -> None:
        """`host` is the server meant, as in the address: `localhost:7462`."""
        self._link = link
        self._host = host
        self._file = link.makefile("rb")

    def close(self) -> None:
        self._file.close()
        self._link.close()

    def request(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes | IO[bytes] | None = None
    ) -> None:
        """Send a request. A file is sent from its current position, and must be as long as `headers` say."""
        lines = [f"{method} {target} HTTP/1.1", f"Host: {self._host}", "Accept-Encoding: identity"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if isinstance(body, bytes) or (body is None and method != "GET"):
            lines.append(f"Content-Length: {len(body or b'')}")
        if any("\r" in line or "\n" in line for line in lines):
            raise ValueError("a header with a line break in it")
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        self._link.sendall(head + body if isinstance(body, bytes) else head)
        if body is not None and not isinstance(body, bytes):
            while block := body.read(BLOCK):
                self._link.sendall(block)

    def read_reply(self) -> HttpReply:
        """Return the reply to the last request with its body unread. Read it to its end before the next
        request.
        """
        while True:
            version, status = _status(self._line())
            headers = self._headers()
            if not 100 <= status < 200:
                return HttpReply(self._file, version, status, headers)

    def _line(self) -> bytes:
        return _line(self._file)

    def _headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        for _ in range(MAX_HEADERS):
            line = self._line()
            if not line:
                return headers
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        raise BadHttpReply(f"the answer has over {MAX_HEADERS} headers")


class HttpReply:
    """A status and a body, which is read once: whole, or line by line."""

    def __init__(self, file: IO[bytes], version: bytes, status: int, headers: Mapping[str, str]) -> None:
        self._file = file
        self.status = status
        coding, length = headers.get("transfer-encoding"), headers.get("content-length")
        is_chunked = coding is not None
        if coding is not None and coding.lower() != "chunked":
            raise BadHttpReply(f"the answer has an unknown transfer encoding, {coding[:60]!r}")
        if is_chunked:
            self._blocks = self._chunks()
        elif status in (204, 304):
            self._blocks = iter(())
        elif length is not None:
            self._blocks = self._exactly(_number(length, 10))
        else:
            self._blocks = self._all()
        is_kept = version == b"HTTP/1.1" and headers.get("connection", "").lower() != "close"
        self.is_last = not is_kept or (not is_chunked and length is None and status not in (204, 304))
        """Whether the server closes the connection after this reply."""

    def read(self) -> bytes:
        """Return the whole body. `BadHttpReply` if it is cut off."""
        return b"".join(self._blocks)

    def lines(self) -> Iterator[bytes]:
        """Yield the lines as they come, without their ends, and finally what follows the last end."""
        rest = b""
        for block in self._blocks:
            *whole, rest = (rest + block).split(b"\n")
            yield from whole
            if len(rest) > MAX_BODY_LINE:
                raise BadHttpReply(f"the answer has a line of over {MAX_BODY_LINE} bytes")
        if rest:
            yield rest

    def _exactly(self, length: int) -> Iterator[bytes]:
        while length:
            block = self._file.read1(min(length, BLOCK))  # type: ignore[attr-defined]
            if not block:
                raise BadHttpReply(f"the answer is cut off {length} bytes before its end")
            length -= len(block)
            yield block

    def _chunks(self) -> Iterator[bytes]:
        while size := _number(_line(self._file).partition(b";")[0].decode("latin-1"), 16):
            yield from self._exactly(size)
            if _line(self._file):
                raise BadHttpReply("the answer has a chunk that is longer than it says")
        while _line(self._file):
            pass  # trailers are ignored

    def _all(self) -> Iterator[bytes]:
        while block := self._file.read1(BLOCK):  # type: ignore[attr-defined]
            yield block


def _line(file: IO[bytes]) -> bytes:
    line = file.readline(MAX_LINE)
    if not line.endswith(b"\n"):
        raise BadHttpReply("no answer" if not line else "the answer is cut off, or has an endless line")
    return line.rstrip(b"\r\n")


def _status(line: bytes) -> tuple[bytes, int]:
    """Parse `HTTP/1.1 200 OK`."""
    version, _, rest = line.partition(b" ")
    code = rest[:3]
    if version not in (b"HTTP/1.0", b"HTTP/1.1") or len(code) != 3 or not code.isdigit():
        raise BadHttpReply("the answer is not HTTP/1.1")
    return version, int(code)


def _number(text: str, base: int) -> int:
    """Parse a length. `int` alone would accept signs and underscores, which other readers do not."""
    digits = text.strip().lower()
    if not 0 < len(digits) <= 16 or not set(digits) <= set("0123456789abcdef"[:base]):
        raise BadHttpReply("the answer has no valid length")
    return int(digits, base)


BY_STATUS: dict[int, type[ShoalError]] = {
    400: errors.SpecError,
    401: errors.Unauthenticated,
    403: errors.Denied,
    404: errors.NotFound,
    405: errors.SpecError,
    408: errors.LimitReached,
    409: errors.StateError,
    413: errors.TooLarge,
    415: errors.SpecError,
    421: errors.Denied,
    422: errors.SpecError,
    429: errors.LimitReached,
    431: errors.LimitReached,
    500: errors.Bug,
    502: errors.EngineRefused,
    503: errors.StoreUnavailable,
}
BY_CODE: dict[str, type[ShoalError]] = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, ShoalError)
}


def error_from(status: int, body: bytes, url: str) -> ShoalError:
    """Return the error that a reply stands for. A reply that is not Shoal's becomes `ServerUnreachable`."""
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    if not isinstance(document, dict) or not isinstance(document.get("code"), str):
        return errors.ServerUnreachable(
            f"{url} answered {status}, but not as Shoal does",
            hint="check the address: `shoal login` alone says which one it is",
        )
    message = str(document.get("detail") or document.get("title") or f"the server answered {status}")
    kind = _kind(document["code"], status)
    facts: dict[str, Any] = {"request_id": document.get("request_id")}
    if issubclass(kind, SpecError):
        problems = tuple(str(problem) for problem in document.get("problems") or ())
        return kind(message, problems=problems, hint=document.get("hint"), **facts)
    return kind(message, hint=document.get("hint"), **facts)


@cache
def _kind(code: str, status: int) -> type[ShoalError]:
    """Return the class with this code. An unknown code is kept on the class of the reply's status."""
    if code in BY_CODE:
        return BY_CODE[code]
    family = BY_STATUS.get(status, ShoalError)
    return type(family.__name__, (family,), {"code": code})
