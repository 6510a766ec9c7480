"""A connection for one question over HTTP, within one time and one size, whoever is at the other end.

`http.client` takes a time for each read and may read without end where chunks are said to be smaller than
nothing. So it only frames the question and parses the answer here: what it sends and hears goes through a
`Line`, which has so much time and takes so many bytes for all of it together.
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

from shoal.clock import BootClock
from shoal.runtime.names import Names

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

MAX_HEAD = 1 << 16
"""Of an answer, beside its body."""
PORTS = {"http": 80, "https": 443}
CLOCK = BootClock()
NAMES = Names()


def _begin_names_anew() -> None:
    NAMES.begin_anew()


os.register_at_fork(after_in_child=_begin_names_anew)  # a keeper forks its supervisor


class Line:
    """`OSError` from anything here: there is no connection, or its time or its size is used up.

    The time counts from the beginning, the look-up of a name included, and anew from each `allow`.
    """

    def __init__(self, url: str, trust: ssl.SSLContext | None, timeout_s: float, num_bytes: int) -> None:
        """Connect. `trust`: who may be at the other end, for https. `ValueError`: it is no address."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in PORTS:
            raise ValueError(f"`{url}` is neither http nor https")
        self._host, self._port = parts.hostname or "", parts.port or PORTS[parts.scheme]
        self.allow(timeout_s, num_bytes)
        self._link = self._connected()
        if parts.scheme == "https":
            self._secure(trust or ssl.create_default_context())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()

    def allow(self, timeout_s: float, num_bytes: int) -> None:
        """From now on so long, and so much to hear."""
        self._until, self._left_bytes = CLOCK.monotonic() + timeout_s, num_bytes

    def post(self, path: str, headers: Mapping[str, str], body: bytes) -> http.client.HTTPResponse:
        """Ask; the head of the answer, whose body can be read. `http.client.HTTPException`: it is none."""
        connection = http.client.HTTPConnection(self._host, self._port)
        connection.sock = self
        connection.request("POST", path, body=body, headers=headers)
        return connection.getresponse()

    # --- what `http.client` asks of a socket

    def sendall(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            self._link.settimeout(self._left_s())
            left = left[self._link.send(left) :]

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(_Ear(self))

    def close(self) -> None:
        """Said before all is read. The line ends with its `with`."""

    def hear(self, buffer: memoryview) -> int:
        size = min(len(buffer), self._left_bytes)
        if size == 0:
            raise OSError("the answer is longer than any may be")
        self._link.settimeout(self._left_s())
        heard = self._link.recv_into(buffer[:size])
        self._left_bytes -= heard
        return heard

    def _left_s(self) -> float:
        left = self._until - CLOCK.monotonic()
        if left <= 0:
            raise TimeoutError("the time for the answer is over")
        return left

    def _connected(self) -> socket.socket:
        """To the first address of the host that takes us. None of them gets the time of all others."""
        found = NAMES.addresses(self._host, self._port, self._left_s())
        last = OSError(f"`{self._host}` has no address")
        for place, (family, kind, protocol, _, address) in enumerate(found):
            link = socket.socket(family, kind, protocol)
            try:
                link.settimeout(self._left_s() / (len(found) - place))
                link.connect(address)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError as error:
                link.close()
                last = error
            else:
                return link
        raise last

    def _secure(self, trust: ssl.SSLContext) -> None:
        try:
            self._link.settimeout(self._left_s())
            self._link = trust.wrap_socket(self._link, server_hostname=self._host)
        except (OSError, ValueError):
            self._link.close()
            raise


class _Ear(io.RawIOBase):
    def __init__(self, line: Line) -> None:
        self._line = line

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        return self._line.hear(memoryview(buffer).cast("B"))
