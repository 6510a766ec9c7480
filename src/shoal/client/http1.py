"""HTTP/1.1 over one socket, as much of it as a client of Shoal needs: a request, and its answer.

The standard library's `http.client` costs every command 20 ms, most of it for `email` and `ssl`
(docs/decisions/0002). No redirects, no pipelining, no header of an answer but those that say where it ends.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from typing import IO

BLOCK = 64 << 10
MAX_LINE = 64 << 10
MAX_HEADERS = 200
MAX_BODY_LINE = 4 << 20


class BadAnswer(OSError):
    """What came back is not HTTP/1.1, or is cut off in the middle."""


class Connection:
    """One kept-alive connection. After an `OSError` from it, it is of no more use."""

    def __init__(self, link: socket.socket, host: str) -> None:
        """`host` is who we mean to speak to, as in the address: `localhost:7462`."""
        self._link = link
        self._host = host
        self._file = link.makefile("rb")

    def close(self) -> None:
        self._file.close()
        self._link.close()

    def request(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes | IO[bytes] | None = None
    ) -> None:
        """Send it. A file is sent from where it stands, and must be as long as `headers` say."""
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

    def answer(self) -> Answer:
        """The answer to the last request, its body not read yet. Read it to its end before the next one."""
        while True:
            version, status = _status(self._line())
            headers = self._headers()
            if not 100 <= status < 200:
                return Answer(self._file, version, status, headers)

    def _line(self) -> bytes:
        return _line(self._file)

    def _headers(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for _ in range(MAX_HEADERS):
            line = self._line()
            if not line:
                return found
            name, _, value = line.decode("latin-1").partition(":")
            found[name.strip().lower()] = value.strip()
        raise BadAnswer(f"the answer has over {MAX_HEADERS} headers")


class Answer:
    """A status and a body, which is read once: whole, or line by line."""

    def __init__(self, file: IO[bytes], version: bytes, status: int, headers: Mapping[str, str]) -> None:
        self._file = file
        self.status = status
        coding, length = headers.get("transfer-encoding"), headers.get("content-length")
        is_chunked = coding is not None
        if coding is not None and coding.lower() != "chunked":
            raise BadAnswer("the answer is encoded in a way nobody asked for")
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
        """Whether the server ends the connection after it."""

    def read(self) -> bytes:
        """The whole body. `BadAnswer` if it is cut off."""
        return b"".join(self._blocks)

    def lines(self) -> Iterator[bytes]:
        """Its lines as they come, without their ends, and what follows the last end."""
        rest = b""
        for block in self._blocks:
            *whole, rest = (rest + block).split(b"\n")
            yield from whole
            if len(rest) > MAX_BODY_LINE:
                raise BadAnswer(f"the answer has a line of over {MAX_BODY_LINE} bytes")
        if rest:
            yield rest

    def _exactly(self, length: int) -> Iterator[bytes]:
        while length:
            block = self._file.read1(min(length, BLOCK))  # type: ignore[attr-defined]
            if not block:
                raise BadAnswer(f"the answer is cut off {length} bytes before its end")
            length -= len(block)
            yield block

    def _chunks(self) -> Iterator[bytes]:
        while size := _number(_line(self._file).partition(b";")[0].decode("latin-1"), 16):
            yield from self._exactly(size)
            if _line(self._file):
                raise BadAnswer("the answer has a chunk that is longer than it says")
        while _line(self._file):
            pass  # trailers say nothing to us

    def _all(self) -> Iterator[bytes]:
        while block := self._file.read1(BLOCK):  # type: ignore[attr-defined]
            yield block


def _line(file: IO[bytes]) -> bytes:
    line = file.readline(MAX_LINE)
    if not line.endswith(b"\n"):
        raise BadAnswer("no answer" if not line else "the answer is cut off, or has an endless line")
    return line.rstrip(b"\r\n")


def _status(line: bytes) -> tuple[bytes, int]:
    """`HTTP/1.1 200 OK`."""
    version, _, rest = line.partition(b" ")
    code = rest[:3]
    if version not in (b"HTTP/1.0", b"HTTP/1.1") or len(code) != 3 or not code.isdigit():
        raise BadAnswer("the answer is not HTTP/1.1")
    return version, int(code)


def _number(text: str, base: int) -> int:
    """A length. `int` alone would take signs and underscores, which nobody else reads as a length."""
    digits = text.strip().lower()
    if not 0 < len(digits) <= 16 or not set(digits) <= set("0123456789abcdef"[:base]):
        raise BadAnswer("the answer says no length that can be read")
    return int(digits, base)
