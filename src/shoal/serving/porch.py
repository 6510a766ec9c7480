"""The way to a replica on another machine: TLS to its porch, which says when the server is reached.

Nothing is sent before that word: until it comes, a request was begun nowhere, and may go to another replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

from shoal.porch import GREETS, OPEN, SCHEME

SILENCE_MS = 15_000
"""A machine that acknowledges nothing for so long is cut off: who was sent there may be sent to another."""
KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""The same where we have nothing to send, and wait for an answer."""


class _Greeted(asyncio.Protocol):
    """Hears the porch's word and nothing else."""

    def __init__(self) -> None:
        self.is_open: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_lost = False

    def data_received(self, data: bytes) -> None:
        if data == OPEN and not self.is_open.done():
            self.is_open.set_result(None)
        else:
            self._end("it speaks unasked")

    def eof_received(self) -> bool:
        self._end("its server was not to be reached")
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(str(exc or "its server was not to be reached"))

    def _end(self, because: str) -> None:
        self.is_lost = True
        if not self.is_open.done():
            self.is_open.set_exception(ConnectionRefusedError(f"the porch closed the connection: {because}"))


async def reached(address: str, name: str, visitor: ssl.SSLContext | None) -> asyncio.Transport:
    """A connection to the server behind the porch there, of the replica of that name; nothing was said on it.

    `OSError`: there is none, or somebody else is there.
    """
    if visitor is None:
        raise ConnectionRefusedError("this data plane has no papers to show at a porch")
    host, _, port = address.removeprefix(SCHEME).rpartition(":")
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_connection(
        _Greeted, host.strip("[]"), int(port), ssl=visitor, server_hostname=name
    )
    try:
        _impatient(transport)
        if transport.get_extra_info("ssl_object").selected_alpn_protocol() != GREETS:
            raise ConnectionRefusedError("it is no porch")
        await protocol.is_open
        if protocol.is_lost:
            raise ConnectionResetError("the porch closed the connection")
    except BaseException:  # also when it takes too long
        transport.abort()
        raise
    return transport


def _impatient(transport: asyncio.Transport) -> None:
    link = transport.get_extra_info("socket")
    with contextlib.suppress(OSError):  # it is gone already, which is noticed elsewhere
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_MS)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            link.setsockopt(socket.IPPROTO_TCP, option, value)
