"""Accept TLS connections with a bound for handshakes that are not over.

`loop.create_server` shows a connection to its protocol after the handshake, so that nobody counts those that
never finish it. Here at most `most` of them are under way: a further one ends the oldest of the holder
(`holders`) that has most of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable

from shoal.holders import Address, SharedSlots, holder_of

HANDSHAKE_S = 5.0
MAX_HANDSHAKES = 256
AT_ONCE = 64
"""Connections accepted before others on this loop have their turn."""
AGAIN_S = 0.5
SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

log = logging.getLogger(__name__)


class TlsListener:
    """Serves `listener`, which listens already, until `close`."""

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        context: ssl.SSLContext,
        *,
        handshake_s: float = HANDSHAKE_S,
        most: int = MAX_HANDSHAKES,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._make_protocol = make_protocol
        self._context = context
        self._handshake_s = handshake_s
        self._shaking = SharedSlots[asyncio.Task[None]](most, asyncio.Task.cancel)
        self._is_closed = False
        listener.setblocking(False)  # noqa: FBT003 - the standard library's own
        self._loop.add_reader(listener, self._accept)

    @property
    def num_handshakes(self) -> int:
        return len(self._shaking)

    def close(self) -> None:
        """Accept no more. Connections that are made go on."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._listener)
            self._listener.close()
            for task in list(self._shaking):
                task.cancel()

    async def wait_closed(self) -> None:
        """Return when no handshake is under way."""
        if self._shaking:
            await asyncio.wait(list(self._shaking))

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                link, client = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in SHORT:
                    raise
                log.warning("no connection can be accepted: %s", error.strerror)
                self._loop.remove_reader(self._listener)
                self._loop.call_later(AGAIN_S, self._go_on)
                return
            self._take(link, client)

    def _go_on(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener, self._accept)

    def _take(self, link: socket.socket, client: Address) -> None:
        link.setblocking(False)  # noqa: FBT003 - the standard library's own
        with contextlib.suppress(OSError):
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = self._loop.create_task(self._shake(link))
        self._shaking.enter(task, holder_of(client, link.getsockname(), is_scarce=True))
        task.add_done_callback(self._shaking.leave)

    async def _shake(self, link: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._make_protocol, link, ssl=self._context, ssl_handshake_timeout=self._handshake_s
            )
        except (OSError, asyncio.CancelledError) as error:  # a stranger's mistake, or one too many
            log.debug("a handshake ended: %s", error)
            link.close()
