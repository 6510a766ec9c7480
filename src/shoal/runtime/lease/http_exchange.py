"""One HTTP request within one time limit and one size limit, whatever server is at the other end.

`http.client` has a timeout for each read, and may read without end if a server sends chunks of a negative
size. So `http.client` only writes the request and parses the reply here. Its bytes go through a
`BoundedConnection`, whose limits count for the whole exchange.

`ask` sends one renewal to the control plane. Only the renewal thread imports this module, and imports it
late, so that ranks do not wait for it. Another program may listen on the control plane's port by now. So only
a reply with a proof counts, and any other reply says nothing about the attempt, even a refusal. The request
reveals nothing that could be used again, because each one is signed by itself. Whatever such a program sends,
and however slowly, it costs at most `timeout_s`.
"""

from __future__ import annotations

import http.client
import io
import os
import socket
import ssl
import urllib.parse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

import msgspec

from shoal.clock import BootClock
from shoal.proof import VERSION, is_proven, sign
from shoal.runtime.lease.resolver import Resolver
from shoal.wire import Renewal, RenewalReply, TaskCredentials

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

MAX_HEAD = 1 << 16
"""Limit in bytes for a reply without its body."""
PORTS = {"http": 80, "https": 443}
CLOCK = BootClock()
RESOLVER = Resolver()


def _reset_resolver() -> None:
    RESOLVER.reset_after_fork()


os.register_at_fork(after_in_child=_reset_resolver)  # a node agent forks its supervisor


class BoundedConnection:
    """A connection with limits. Every method raises `OSError` if there is no connection or a limit is
    reached.

    The time counts from the start, including the lookup of the name. `set_limits` starts it again.
    """

    def __init__(
        self, url: str, tls_context: ssl.SSLContext | None, timeout_s: float, num_bytes: int
    ) -> None:
        """Connect. `tls_context`: which servers to trust, for https. `ValueError`: the URL is malformed."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in PORTS:
            raise ValueError(f"`{url}` is neither http nor https")
        self._host, self._port = parts.hostname or "", parts.port or PORTS[parts.scheme]
        self.set_limits(timeout_s, num_bytes)
        self._link = self._connected()
        if parts.scheme == "https":
            self._secure(tls_context or ssl.create_default_context())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()

    def set_limits(self, timeout_s: float, num_bytes: int) -> None:
        """Allow this much time from now on, and this many bytes to receive."""
        self._until, self._remaining_bytes = CLOCK.monotonic() + timeout_s, num_bytes

    def post(self, path: str, headers: Mapping[str, str], body: bytes) -> http.client.HTTPResponse:
        """Send the request and return the head of the reply, whose body can then be read.

        `http.client.HTTPException`: the reply is malformed.
        """
        connection = http.client.HTTPConnection(self._host, self._port)
        connection.sock = self
        connection.request("POST", path, body=body, headers=headers)
        return connection.getresponse()

    # --- what `http.client` needs of a socket

    def sendall(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            self._link.settimeout(self._remaining_s())
            left = left[self._link.send(left) :]

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(_ReceiveStream(self))

    def close(self) -> None:
        """Do nothing: `http.client` calls this before all is read. `__exit__` closes the connection."""

    def receive(self, buffer: memoryview) -> int:
        size = min(len(buffer), self._remaining_bytes)
        if size == 0:
            raise OSError("the reply is longer than the limit")
        self._link.settimeout(self._remaining_s())
        num_read = self._link.recv_into(buffer[:size])
        self._remaining_bytes -= num_read
        return num_read

    def _remaining_s(self) -> float:
        left = self._until - CLOCK.monotonic()
        if left <= 0:
            raise TimeoutError("the time for the reply is over")
        return left

    def _connected(self) -> socket.socket:
        """Connect to the first address that accepts. Each address gets an equal part of the time left."""
        addresses = RESOLVER.resolve(self._host, self._port, self._remaining_s())
        last = OSError(f"`{self._host}` has no address")
        for place, (family, kind, protocol, _, address) in enumerate(addresses):
            link = socket.socket(family, kind, protocol)
            try:
                link.settimeout(self._remaining_s() / (len(addresses) - place))
                link.connect(address)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError as error:
                link.close()
                last = error
            else:
                return link
        raise last

    def _secure(self, tls_context: ssl.SSLContext) -> None:
        try:
            self._link.settimeout(self._remaining_s())
            self._link = tls_context.wrap_socket(self._link, server_hostname=self._host)
        except (OSError, ValueError):
            self._link.close()
            raise


class _ReceiveStream(io.RawIOBase):
    def __init__(self, connection: BoundedConnection) -> None:
        self._connection = connection

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        return self._connection.receive(memoryview(buffer).cast("B"))


MAX_REPLY = 65536
NONCE_BYTES = 16
_REPLY = msgspec.json.Decoder(RenewalReply)  # made once; two threads may decode at the same time


def ask(
    url: str, credentials: TaskCredentials, renewal: Renewal, timeout_s: float, ca_file: str | None = None
) -> RenewalReply | None:
    """Return the control plane's reply. None: there was none, which says nothing about what happened."""
    nonce = os.urandom(NONCE_BYTES).hex()
    renewal = msgspec.structs.replace(renewal, nonce=nonce, proof_version=VERSION)
    body = msgspec.json.encode(renewal)
    token = sign(credentials.proof_key, renewal, body)
    try:
        answer = _REPLY.decode(_post(url, token, body, timeout_s, ca_file))
        return answer if is_proven(credentials.proof_key, renewal, answer) else None
    except Exception:  # noqa: BLE001 - a server that is not ours may make a parser raise anything
        return None


def _post(url: str, token: str, body: bytes, timeout_s: float, ca_file: str | None) -> bytes:
    """Return the body of a reply with status 200; empty for everything else."""
    trust = ssl.create_default_context(cafile=ca_file) if url.startswith("https:") else None
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    with BoundedConnection(url, trust, timeout_s, MAX_HEAD + MAX_REPLY) as line:
        answer = line.post(urllib.parse.urlsplit(url).path, headers, body)
        return answer.read(MAX_REPLY) if answer.status == http.client.OK else b""
