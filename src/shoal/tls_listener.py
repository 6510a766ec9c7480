"""Accept TLS connections with a limit on unfinished handshakes.

`loop.create_server` shows a connection to its protocol only after the handshake, so connections that never
finish it would not be counted. Here at most `max_handshakes` are in progress. One more ends the oldest of the
holder (`connection_quota`) that has the most.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable

from shoal.connection_quota import Address, ConnectionQuota, holder_of

HANDSHAKE_S = 5.0
MAX_HANDSHAKES = 256
ACCEPTS_PER_TURN = 64
"""Connections accepted before other work of this loop gets its turn."""
RETRY_S = 0.5
OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

log = logging.getLogger(__name__)


class TlsListener:
    """Serve `listener`, which already listens, until `close`."""

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        context: ssl.SSLContext,
        *,
        handshake_s: float = HANDSHAKE_S,
        max_handshakes: int = MAX_HANDSHAKES,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._make_protocol = make_protocol
        self._context = context
        self._handshake_s = handshake_s
        self._handshakes = ConnectionQuota[asyncio.Task[None]](max_handshakes, asyncio.Task.cancel)
        self._is_closed = False
        listener.setblocking(False)  # noqa: FBT003 - the standard library's own
        self._loop.add_reader(listener, self._accept)

    @property
    def num_handshakes(self) -> int:
        return len(self._handshakes)

    def close(self) -> None:
        """Stop accepting. Established connections continue."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._listener)
            self._listener.close()
            for task in list(self._handshakes):
                task.cancel()

    async def wait_closed(self) -> None:
        """Return when no handshake is in progress."""
        if self._handshakes:
            await asyncio.wait(list(self._handshakes))

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                link, client = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in OUT_OF_RESOURCES:
                    raise
                log.warning("no connection can be accepted: %s", error.strerror)
                self._loop.remove_reader(self._listener)
                self._loop.call_later(RETRY_S, self._resume)
                return
            self._start_handshake(link, client)

    def _resume(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener, self._accept)

    def _start_handshake(self, link: socket.socket, client: Address) -> None:
        link.setblocking(False)  # noqa: FBT003 - the standard library's own
        with contextlib.suppress(OSError):
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = self._loop.create_task(self._handshake(link))
        self._handshakes.admit(task, holder_of(client, link.getsockname(), is_scarce=True))
        task.add_done_callback(self._handshakes.release)

    async def _handshake(self, link: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._make_protocol, link, ssl=self._context, ssl_handshake_timeout=self._handshake_s
            )
        except (OSError, asyncio.CancelledError) as error:  # the client's mistake, or above the limit
            log.debug("a handshake ended: %s", error)
            link.close()
