"""A caller that sends no more: either it waits for its reply, or it is gone.

Both look the same from here, but a caller that is gone refuses what is written to it. So write something that
every HTTP/1.1 reader skips. If the reply has begun, or for HTTP/1.0, there is no such thing: then a caller is
believed for `QUIET_S` after each piece of its reply.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from time import monotonic

from shoal.serving.exchange.exchange import Exchange
from shoal.serving.proxy.local_reply import CONTINUE

TCP_CLOSE = 7
"""The kernel's state of a connection that was reset."""
FIRST_LOOK_S, LAST_LOOK_S = 0.05, 1.0
"""First and longest interval of the checks whether the caller is still there."""
QUIET_S = 5.0
"""How long a reply may pause where nothing else can be written to its caller."""


class HalfClosed:
    """Checks such a caller until its exchange is over, and aborts the connection if it is gone."""

    __slots__ = ("_exchange_now", "_transport", "_written_at")

    def __init__(self, transport: asyncio.Transport, exchange_now: Callable[[], Exchange | None]) -> None:
        """`exchange_now` returns the connection's exchange, if it has one."""
        self._transport = transport
        self._exchange_now = exchange_now
        self._written_at = monotonic()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write to the caller. Everything goes through here from now on."""
        self._written_at = monotonic()
        self._transport.write(data)

    def begin(self) -> None:
        exchange = self._exchange_now()
        if exchange is not None and not exchange.has_begun and not exchange.entry.is_http10:
            self.write(CONTINUE)
        self._check(FIRST_LOOK_S)

    def _check(self, delay_s: float) -> None:
        exchange = self._exchange_now()
        if exchange is None or self._transport.is_closing():
            return
        if self._is_reset() or (_cannot_ask(exchange) and self._is_quiet()):
            self._transport.abort()
        else:
            asyncio.get_running_loop().call_later(delay_s, self._check, min(LAST_LOOK_S, delay_s * 2))

    def _is_reset(self) -> bool:
        link = self._transport.get_extra_info("socket")
        return bool(link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSE)

    def _is_quiet(self) -> bool:
        return not self._transport.get_write_buffer_size() and monotonic() - self._written_at > QUIET_S


def _cannot_ask(exchange: Exchange) -> bool:
    """Return whether nothing can be written that the caller would skip."""
    return exchange.has_begun or exchange.entry.is_http10
