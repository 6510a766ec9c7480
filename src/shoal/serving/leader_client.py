"""HTTP requests from a data plane to the control plane: at a fixed URL, or where the leader listens now."""

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

from shoal.local_sockets import UnexpectedListener, is_loopback, socket_owners, sockets_of

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

ANSWER_S = 5.0
"""Limit for the whole head of a reply, plus slack for a body that arrives slower than `LEAST_RATE`."""
LEAST_RATE = 256 << 10
"""Bytes a second. The time limit grows with the bytes received, so a slow trickle of bytes cannot extend
it."""
MAX_TABLE_BYTES = 256 << 20
UNAVAILABLE = 503
"""A control plane on standby, or without its database. Another one may lead."""
LOCK = "server.lock"
TABLE, REPORTS = "/v1/serving/table?wait_s=3", "/v1/serving/reports"
"""Paths of a control plane. The reply waits up to 3 s for a newer table, which is less than `ANSWER_S`."""


class LeaderAddress(msgspec.Struct):
    """The fields a data plane needs of the file in which a control plane says where it listens."""

    url: str
    pid: int = 0
    home: str = ""
    tls_pem: str = ""
    """The certificate itself, because a file of a leader on another machine cannot be read here."""


_read_file = msgspec.json.Decoder(LeaderAddress).decode


class LeaderClient:
    """`files` say where control planes listen; the client tries them in order. A request for a path goes to
    the first control plane that answers; a request for a URL needs no file. For one thread at a time.

    The connection is kept, because finding the process at the other end takes long on a busy machine.
    """

    def __init__(self, token: str, files: Sequence[Path] = ()) -> None:
        self._token = token
        self._files: list[Path] = list(files)
        self._link: http.client.HTTPConnection | None = None

    def request(
        self, method: str, where: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Send one request, to a URL or to a path at the leader. May be sent twice. Blocks at most `ANSWER_S`
        for each control plane, plus the time that the length of the reply needs.

        `OSError` (also when another process holds the port), `ValueError`, `HTTPException`: no control plane
        answered. The error is that of the last one tried.
        """
        if self._link is not None:
            try:
                status, content = self._request_once(method, where, body, headers or {})
                if status != UNAVAILABLE:
                    return status, content
            except (OSError, http.client.HTTPException):
                pass  # the connection may have been closed, or another control plane leads now
            self.close()
        return self._request_in_turn(method, where, body, headers or {})

    def _request_in_turn(
        self, method: str, where: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        """Return the first reply that is not 503, or else the last reply."""
        files: list[Path | None] = [*self._files] or [None]
        for file in files[:-1]:
            try:
                status, content = self._request_once(method, where, body, headers, file)
            except (OSError, ValueError, http.client.HTTPException):
                continue
            if status != UNAVAILABLE:
                return status, content
            self.close()
        return self._request_once(method, where, body, headers, files[-1])

    def _request_once(
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
        link = self._link or self._connect(where, file)
        self._link = None
        try:
            parts = urllib.parse.urlsplit(where)
            link.request(method, (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), body, sent)
            response = link.getresponse()
            status_and_body = response.status, response.read(MAX_TABLE_BYTES)
        except BaseException:
            link.close()
            raise
        self._link = None if response.will_close else link
        return status_and_body

    def _connect(self, where: str, file: Path | None) -> http.client.HTTPConnection:
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


class _PacedResponse(http.client.HTTPResponse):
    """A response with a time limit for its whole head and a least rate for its body. `http.client` limits
    only each single read, and reads `100 Continue` without end.
    """

    def __init__(self, sock: socket.socket, *args: Any, **named: Any) -> None:
        super().__init__(sock, *args, **named)
        self._ear = _PacedReader(sock, self.fp)
        self.fp = io.BufferedReader(self._ear)

    def begin(self) -> None:
        super().begin()
        self._ear.pace(LEAST_RATE)


class _PacedReader(io.RawIOBase):
    """Reads from the socket; `TimeoutError` if the expected bytes did not arrive in time."""

    def __init__(self, link: socket.socket, file: io.BufferedIOBase) -> None:
        self._link = link
        self._file = file
        """While this is open, the socket stays open, even after `http.client` is done with it after the
        head."""
        self._until = monotonic() + ANSWER_S
        self._rate: int | None = None

    def pace(self, rate: int) -> None:
        """From now on each received byte extends the limit, at `rate` bytes a second."""
        self._until, self._rate = monotonic() + ANSWER_S, rate

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        left_s = self._until - monotonic()
        if left_s <= 0:
            raise TimeoutError("the time for the answer is over")
        self._link.settimeout(min(left_s, ANSWER_S))
        num_bytes = self._link.recv_into(buffer)
        self._until += num_bytes / self._rate if self._rate else 0.0
        return num_bytes

    def close(self) -> None:
        self._file.close()
        super().close()


def _link(parts: urllib.parse.SplitResult, server: LeaderAddress | None) -> http.client.HTTPConnection:
    host = parts.hostname or ""
    if parts.scheme != "https":
        link = http.client.HTTPConnection(host, parts.port, timeout=ANSWER_S)
    else:
        trust = ssl.create_default_context(cadata=server.tls_pem if server and server.tls_pem else None)
        link = http.client.HTTPSConnection(host, parts.port, timeout=ANSWER_S, context=trust)
    link.response_class = _PacedResponse
    return link


def _refuse_strangers(link: socket.socket, server: LeaderAddress) -> None:
    """Raise if another process holds the port. It could take the token and set a table while
    Shoal is down.
    """
    holders = socket_owners(link) if is_loopback(link) else None
    if holders is None:
        return
    server_sockets = sockets_of(server.pid, with_open=Path(server.home) / LOCK)
    for holder in holders:
        if holder.inode not in server_sockets:
            port = link.getpeername()[1]
            raise UnexpectedListener(
                f"port {port} is held by {holder}, not by the control plane of {server.home}", "shoal up"
            )
