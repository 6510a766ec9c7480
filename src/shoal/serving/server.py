"""The control plane, for a data plane: at one URL for ever, or wherever the one of a home listens now."""

from __future__ import annotations

import http.client
import socket
import ssl
import urllib.parse
from pathlib import Path

import msgspec

from shoal.loopback import Stranger, is_loopback, serving, sockets_of

ANSWER_S = 5.0
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
    """`home`: of the control plane that paths are meant for. URLs need none."""

    def __init__(self, token: str, home: Path | None = None) -> None:
        self._token = token
        self._home = home

    def talk(
        self, method: str, where: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """One request, to a URL or to a path at the home's control plane. Blocks.

        `OSError` (also for one that is no control plane), `ValueError`: nobody answered.
        """
        told = _read_file((self._home / "server.json").read_bytes()) if self._home is not None else None
        parts = urllib.parse.urlsplit((told.url if told else "") + where)
        link = _link(parts, told)
        sent = {"content-type": "application/json", **(headers or {})}
        if self._token:
            sent["authorization"] = f"Bearer {self._token}"
        try:
            link.connect()
            if told is not None and self._home is not None and parts.scheme == "http":
                _refuse_strangers(link.sock, told.pid, self._home)
            link.request(method, (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), body, sent)
            answer = link.getresponse()
            return answer.status, answer.read(MAX_TABLE_BYTES)
        finally:
            link.close()


def _link(parts: urllib.parse.SplitResult, told: ServerFile | None) -> http.client.HTTPConnection:
    host = parts.hostname or ""
    if parts.scheme != "https":
        return http.client.HTTPConnection(host, parts.port, timeout=ANSWER_S)
    trust = ssl.create_default_context(cafile=told.tls_cert if told else None)
    return http.client.HTTPSConnection(host, parts.port, timeout=ANSWER_S, context=trust)


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
