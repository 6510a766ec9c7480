"""The control plane, for a data plane: at a fixed URL, or wherever the one that leads listens now."""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.loopback import Stranger, is_loopback, serving, sockets_of

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

ANSWER_S = 5.0
"""For all of the head of an answer, and for as much of its body as comes at no `LEAST_RATE`."""
LEAST_RATE = 256 << 10
"""Bytes in a second: a table may take as long as it is long, and no longer by being sent byte by byte."""
MAX_TABLE_BYTES = 256 << 20
UNAVAILABLE = 503
"""A control plane that stands by, or cannot reach its database: another one may lead."""
LOCK = "server.lock"
TABLE, REPORTS = "/v1/serving/table?wait_s=3", "/v1/serving/reports"
"""Of a control plane. The answer waits for a newer table: for less than one is waited for here."""


class ServerFile(msgspec.Struct):
    """What a data plane needs of the files in which a control plane says where it listens."""

    url: str
    pid: int = 0
    home: str = ""
    tls_pem: str = ""
    """The certificate itself: the file of a leader on another machine cannot be read here."""


_read_file = msgspec.json.Decoder(ServerFile).decode


class Server:
    """`files`: where control planes say that they listen, the one to try first in front. Requests for a path
    go to the first that answers; requests for a URL need no file. For one thread at a time.

    The connection is kept: to find out which process is at the other end takes long on a busy machine.
    """

    def __init__(self, token: str, files: Sequence[Path] = ()) -> None:
        self._token = token
        self._files: list[Path] = list(files)
        self._link: http.client.HTTPConnection | None = None

    def talk(
        self, method: str, where: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """One request, to a URL or to a path at the control plane that leads. Blocks for at most `ANSWER_S`
        for each control plane, plus the time that the length of the answer needs. May be sent twice.

        `OSError` (also when a stranger holds the port), `ValueError`, `HTTPException`: no control plane
        answered. The error is that of the last one tried.
        """
        if self._link is not None:
            try:
                status, content = self._ask(method, where, body, headers or {})
                if status != UNAVAILABLE:
                    return status, content
            except (OSError, http.client.HTTPException):
                pass  # the connection may have been closed, or another one leads by now
            self.close()
        return self._ask_in_turn(method, where, body, headers or {})

    def _ask_in_turn(
        self, method: str, where: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        """The first answer that is not 503, else the last one's."""
        files: list[Path | None] = [*self._files] or [None]
        for file in files[:-1]:
            try:
                status, content = self._ask(method, where, body, headers, file)
            except (OSError, ValueError, http.client.HTTPException):
                continue
            if status != UNAVAILABLE:
                return status, content
            self.close()
        return self._ask(method, where, body, headers, files[-1])

    def _ask(
        self,
        method: str,
        where: str,
        body: bytes | None,
        headers: dict[str, str],
        file: Path | None = None,
    ) -> tuple[int, bytes]:
        sent = {"content-type": "application/json", **headers}
        if self._token:
            sent["authorization"] = f"Bearer {self._token}"
        link = self._link or self._connected(where, file)
        self._link = None
        try:
            parts = urllib.parse.urlsplit(where)
            link.request(method, (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), body, sent)
            answer = link.getresponse()
            found = answer.status, answer.read(MAX_TABLE_BYTES)
        except BaseException:
            link.close()
            raise
        self._link = None if answer.will_close else link
        return found

    def _connected(self, where: str, file: Path | None) -> http.client.HTTPConnection:
        server = _read_file(file.read_bytes()) if file is not None else None
        parts = urllib.parse.urlsplit((server.url if server else "") + where)
        link = _link(parts, server)
        link.connect()
        try:
            if server is not None and parts.scheme == "http":
                _refuse_strangers(link.sock, server)
        except OSError:
            link.close()
            raise
        return link

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


class _Answer(http.client.HTTPResponse):
    """One that has a time for all of its head, and a pace for its body: `http.client` has a time for each
    read alone, and reads `100 Continue` for ever.
    """

    def __init__(self, sock: socket.socket, *given: Any, **named: Any) -> None:
        super().__init__(sock, *given, **named)
        self._ear = _Ear(sock, self.fp)
        self.fp = io.BufferedReader(self._ear)

    def begin(self) -> None:
        super().begin()
        self._ear.pace(LEAST_RATE)


class _Ear(io.RawIOBase):
    """`TimeoutError` from a read: what was to be heard by now did not come."""

    def __init__(self, link: socket.socket, file: io.BufferedIOBase) -> None:
        self._link = link
        self._file = file
        """While this is open, so is the link, also where `http.client` is done with it after the head."""
        self._until = monotonic() + ANSWER_S
        self._rate: int | None = None

    def pace(self, rate: int) -> None:
        """From now on the time is as long as what is heard, at this many bytes a second."""
        self._until, self._rate = monotonic() + ANSWER_S, rate

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        left_s = self._until - monotonic()
        if left_s <= 0:
            raise TimeoutError("the time for the answer is over")
        self._link.settimeout(min(left_s, ANSWER_S))
        heard = self._link.recv_into(buffer)
        self._until += heard / self._rate if self._rate else 0.0
        return heard

    def close(self) -> None:
        self._file.close()
        super().close()


def _link(parts: urllib.parse.SplitResult, server: ServerFile | None) -> http.client.HTTPConnection:
    host = parts.hostname or ""
    if parts.scheme != "https":
        link = http.client.HTTPConnection(host, parts.port, timeout=ANSWER_S)
    else:
        trust = ssl.create_default_context(cadata=server.tls_pem if server and server.tls_pem else None)
        link = http.client.HTTPSConnection(host, parts.port, timeout=ANSWER_S, context=trust)
    link.response_class = _Answer
    return link


def _refuse_strangers(link: socket.socket, server: ServerFile) -> None:
    """While a control plane is down any process may take its port: it gets no token and sets no table."""
    holders = serving(link) if is_loopback(link) else None
    if holders is None:
        return
    own = sockets_of(server.pid, with_open=Path(server.home) / LOCK)
    for holder in holders:
        if holder.inode not in own:
            port = link.getpeername()[1]
            raise Stranger(
                f"port {port} is held by {holder}, not by the control plane of {server.home}", "shoal up"
            )
