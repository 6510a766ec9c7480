"""The control plane, for a data plane: at one URL for ever, or wherever the one of a home listens now."""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import urllib.parse
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
LOCK = "server.lock"
TABLE, REPORTS = "/v1/serving/table?wait_s=3", "/v1/serving/reports"
"""Of a control plane. The answer waits for a newer table: for less than one is waited for here."""


class ServerFile(msgspec.Struct):
    """What a data plane needs of the `server.json` that every control plane of a home writes."""

    url: str
    pid: int = 0
    tls_cert: str | None = None


_read_file = msgspec.json.Decoder(ServerFile).decode


class Server:
    """`home`: of the control plane that paths are meant for; URLs need none. For one thread at a time.

    Its connection is kept: who is at the other end is looked at once, which takes long on a busy machine.
    """

    def __init__(self, token: str, home: Path | None = None) -> None:
        self._token = token
        self._home = home
        self._link: http.client.HTTPConnection | None = None

    def talk(
        self, method: str, where: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """One request, to a URL or to a path at the home's control plane. Blocks, however it is answered, for
        a time that only the length of the answer adds to. May be sent twice.

        `OSError` (also for one that is no control plane), `ValueError`, `HTTPException`: nobody answered.
        """
        was_kept = self._link is not None
        try:
            return self._ask(method, where, body, headers or {})
        except (OSError, http.client.HTTPException):
            if not was_kept:
                raise
        return self._ask(
            method, where, body, headers or {}
        )  # it may have been closed, or be elsewhere by now

    def _ask(self, method: str, where: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        sent = {"content-type": "application/json", **headers}
        if self._token:
            sent["authorization"] = f"Bearer {self._token}"
        link = self._link or self._connected(where)
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

    def _connected(self, where: str) -> http.client.HTTPConnection:
        told = _read_file((self._home / "server.json").read_bytes()) if self._home is not None else None
        parts = urllib.parse.urlsplit((told.url if told else "") + where)
        link = _link(parts, told)
        link.connect()
        try:
            if told is not None and self._home is not None and parts.scheme == "http":
                _refuse_strangers(link.sock, told.pid, self._home)
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


def _link(parts: urllib.parse.SplitResult, told: ServerFile | None) -> http.client.HTTPConnection:
    host = parts.hostname or ""
    if parts.scheme != "https":
        link = http.client.HTTPConnection(host, parts.port, timeout=ANSWER_S)
    else:
        trust = ssl.create_default_context(cafile=told.tls_cert if told else None)
        link = http.client.HTTPSConnection(host, parts.port, timeout=ANSWER_S, context=trust)
    link.response_class = _Answer
    return link


def _refuse_strangers(link: socket.socket, pid: int, home: Path) -> None:
    """While a control plane is down anybody may take its port: they get no token and set no table."""
    found = serving(link) if is_loopback(link) else None
    if found is None:
        return
    own = sockets_of(pid, with_open=home / LOCK)
    for one in found:
        if one.inode not in own:
            port = link.getpeername()[1]
            raise Stranger(f"port {port} is held by {one}, not by the control plane of {home}", "shoal up")
