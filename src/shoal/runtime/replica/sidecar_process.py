"""The sidecar's loop: takes connections, and lets only data planes through to the server.

It is one loop without threads, in a process of its own that dies with its supervisor. So neither a busy
server nor a flood of connections keeps the supervisor from renewing its lease. A connection that does not
prove in time that it comes from a data plane is closed. If too many wait for that, the address with most of
them loses its oldest, so that they keep no data plane out.
"""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import sys

import msgspec

from shoal.clock import BootClock, Clock
from shoal.connection_quota import ConnectionQuota, holder_of
from shoal.runtime.process import kernel
from shoal.runtime.replica.sidecar_config import LISTENER_FD, SidecarConfig
from shoal.runtime.replica.tunnel import Tunnel, TunnelBroken
from shoal.sidecar_tls import sidecar_context

HANDSHAKE_S = 10.0
"""Limit for the handshake, and for the server to take the connection."""
LINGER_S = 60.0
"""How long a caller may take to end after the server has ended."""
MAX_STRANGERS = 64
RESERVED = 32
"""Descriptors that no tunnel may use."""
TURN_S = 1.0
KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""A data plane whose machine is gone is noticed after a minute."""


def main() -> int:
    """Serve until killed."""
    kernel.hide_memory()
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=SidecarConfig)
    kernel.die_with_parent(config.supervisor_pid)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = hard if hard != resource.RLIM_INFINITY else 1 << 20
    listener = socket.socket(fileno=LISTENER_FD)
    sidecar = Sidecar(listener, config, BootClock(), max_tunnels=max(1, (most - RESERVED) // 2))
    while True:
        sidecar.poll(TURN_S)


class Sidecar:
    def __init__(
        self, listener: socket.socket, config: SidecarConfig, clock: Clock, *, max_tunnels: int
    ) -> None:
        self._listener = listener
        self._listener.setblocking(False)  # noqa: FBT003 - the standard library's own
        self._tls_context = sidecar_context(config.tls_identity)
        self._server = config.server
        self._clock = clock
        self._max_tunnels = max_tunnels
        self._epoll = select.epoll()
        self._epoll.register(listener.fileno(), select.EPOLLIN)
        self._waiting: dict[int, Tunnel] = {}
        """The tunnels, by each descriptor that they wait for."""
        self._registered: dict[Tunnel, dict[int, int]] = {}
        """The events that each tunnel waits for, the oldest tunnel first."""
        self._strangers = ConnectionQuota(MAX_STRANGERS, self._end)
        self._looked_at = 0.0

    def poll(self, timeout_s: float) -> None:
        """Wait until something happens or the time is over, and handle all of it.

        An error of a caller or of the server ends only its own tunnel.
        """
        for fd, events in self._epoll.poll(timeout_s):
            if fd == self._listener.fileno():
                self._accept()
                continue
            tunnel = self._waiting.get(fd)
            if tunnel is not None:  # otherwise an earlier event ended it
                self._work(tunnel, fd, events)
        now = self._clock.monotonic()
        if now - self._looked_at >= TURN_S:
            self._looked_at = now
            self._close_expired(now)

    def close(self) -> None:
        for tunnel in list(self._registered):
            self._end(tunnel)
        self._epoll.close()

    def _accept(self) -> None:
        try:
            plain, client = self._listener.accept()
        except OSError:  # the caller is gone, or no descriptor is free: the next turn tries again
            return
        if len(self._registered) >= self._max_tunnels:
            plain.close()
            return
        with contextlib.suppress(OSError):  # a closed connection has no options
            plain.setblocking(False)  # noqa: FBT003 - the standard library's own
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE:
                plain.setsockopt(socket.IPPROTO_TCP, option, value)
            holder = holder_of(client, plain.getsockname(), is_scarce=True)
            link = self._tls_context.wrap_socket(
                plain, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=False
            )
            tunnel = Tunnel(link, self._server, self._clock.monotonic() + HANDSHAKE_S)
            self._registered[tunnel] = {}
            self._strangers.admit(tunnel, holder)
            self._register(tunnel)

    def _work(self, tunnel: Tunnel, fd: int, events: int) -> None:
        try:
            tunnel.work(fd, events)
        except TunnelBroken:
            self._end(tunnel)
            return
        if not tunnel.is_stranger:
            self._strangers.release(tunnel)
        if tunnel.wanted:
            self._register(tunnel)
        else:
            self._end(tunnel)

    def _register(self, tunnel: Tunnel) -> None:
        before, after = self._registered[tunnel], tunnel.wanted
        if before == after:
            return
        for fd in before.keys() - after.keys():
            del self._waiting[fd]
            with contextlib.suppress(OSError):  # closed in the meantime, as the broker's connection is
                self._epoll.unregister(fd)
        for fd, events in after.items():
            if fd not in before:
                self._epoll.register(fd, events)
                self._waiting[fd] = tunnel
            elif before[fd] != events:
                self._epoll.modify(fd, events)
        self._registered[tunnel] = after

    def _end(self, tunnel: Tunnel) -> None:
        self._strangers.release(tunnel)
        for fd in self._registered.pop(tunnel):
            del self._waiting[fd]
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)
        tunnel.close()

    def _close_expired(self, now: float) -> None:
        for tunnel in list(self._registered):
            if tunnel.deadline is None:
                tunnel.deadline = now + LINGER_S if tunnel.is_ending else None
            elif tunnel.deadline <= now:
                self._end(tunnel)
