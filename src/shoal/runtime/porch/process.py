"""The porch itself: takes connections, lets data planes through to the server, and nobody else.

One loop without threads, in a process of its own that dies with its supervisor: neither a busy server nor a
stranger at the porch keeps the supervisor from its lease. Whoever has not proved to be a data plane in time
is cut off; when many have not, the address with most of them loses its oldest, so that they keep no data
plane out.
"""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import sys

import msgspec

from shoal.clock import BootClock, Clock
from shoal.holders import SharedSlots, holder_of
from shoal.porch import guard
from shoal.runtime import kernel
from shoal.runtime.porch.brief import LISTENER, Brief
from shoal.runtime.porch.passage import Broken, Passage

SHAKE_S = 10.0
"""For the handshake, and for the server to take the connection."""
LINGER_S = 60.0
"""For a caller to end, too, after the server has."""
MAX_STRANGERS = 64
RESERVED = 32
"""Descriptors that are no passages'."""
TURN_S = 1.0
KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""A data plane whose machine is gone is noticed after a minute."""


def main() -> int:
    """Until killed."""
    kernel.hide_memory()
    brief = msgspec.json.decode(sys.stdin.buffer.read(), type=Brief)
    kernel.die_with_parent(brief.supervisor)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = hard if hard != resource.RLIM_INFINITY else 1 << 20
    listener = socket.socket(fileno=LISTENER)
    porch = Porch(listener, brief, BootClock(), max_passages=max(1, (most - RESERVED) // 2))
    while True:
        porch.turn(TURN_S)


class Porch:
    def __init__(self, listener: socket.socket, brief: Brief, clock: Clock, *, max_passages: int) -> None:
        self._listener = listener
        self._listener.setblocking(False)  # noqa: FBT003 - the standard library's own
        self._guard = guard(brief.papers)
        self._server = brief.server
        self._clock = clock
        self._max_passages = max_passages
        self._epoll = select.epoll()
        self._epoll.register(listener.fileno(), select.EPOLLIN)
        self._waiting: dict[int, Passage] = {}
        """By each descriptor that is waited for."""
        self._registered: dict[Passage, dict[int, int]] = {}
        """What is waited for, of each passage, oldest first."""
        self._strangers = SharedSlots(MAX_STRANGERS, self._end)
        self._looked_at = 0.0

    def turn(self, timeout_s: float) -> None:
        """Wait until something happens or the time is over, and deal with all of it. A stranger's mistakes,
        and a server's, end their own passage and nothing else.
        """
        for fd, events in self._epoll.poll(timeout_s):
            if fd == self._listener.fileno():
                self._take()
                continue
            passage = self._waiting.get(fd)
            if passage is not None:  # else it ended with an event before this one
                self._work(passage, fd, events)
        now = self._clock.monotonic()
        if now - self._looked_at >= TURN_S:
            self._looked_at = now
            self._hurry(now)

    def close(self) -> None:
        for passage in list(self._registered):
            self._end(passage)
        self._epoll.close()

    def _take(self) -> None:
        try:
            plain, client = self._listener.accept()
        except OSError:  # gone again, or no descriptor is left: the next turn tries anew
            return
        if len(self._registered) >= self._max_passages:
            plain.close()
            return
        with contextlib.suppress(OSError):  # who is gone already has no options
            plain.setblocking(False)  # noqa: FBT003 - the standard library's own
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE:
                plain.setsockopt(socket.IPPROTO_TCP, option, value)
            holder = holder_of(client, plain.getsockname(), is_scarce=True)
            link = self._guard.wrap_socket(
                plain, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=False
            )
            passage = Passage(link, self._server, self._clock.monotonic() + SHAKE_S)
            self._registered[passage] = {}
            self._strangers.enter(passage, holder)
            self._await(passage)

    def _work(self, passage: Passage, fd: int, events: int) -> None:
        try:
            passage.work(fd, events)
        except Broken:
            self._end(passage)
            return
        if not passage.is_stranger:
            self._strangers.leave(passage)
        if passage.wanted:
            self._await(passage)
        else:
            self._end(passage)

    def _await(self, passage: Passage) -> None:
        before, after = self._registered[passage], passage.wanted
        if before == after:
            return
        for fd in before.keys() - after.keys():
            del self._waiting[fd]
            with contextlib.suppress(OSError):  # closed on the way, as a door's is
                self._epoll.unregister(fd)
        for fd, events in after.items():
            if fd not in before:
                self._epoll.register(fd, events)
                self._waiting[fd] = passage
            elif before[fd] != events:
                self._epoll.modify(fd, events)
        self._registered[passage] = after

    def _end(self, passage: Passage) -> None:
        self._strangers.leave(passage)
        for fd in self._registered.pop(passage):
            del self._waiting[fd]
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)
        passage.close()

    def _hurry(self, now: float) -> None:
        for passage in list(self._registered):
            if passage.deadline is None:
                passage.deadline = now + LINGER_S if passage.is_ending else None
            elif passage.deadline <= now:
                self._end(passage)
