"""Hedging: a late request goes to a second replica as well. The first reply wins; the other request is cut
off.

A hedge counts what it takes of its replica, and gives it back exactly once or hands it over with the
request.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Protocol

from shoal.serving.admission.accounts import CallerAccount
from shoal.serving.admission.routes import RouteEntry
from shoal.serving.balance.replica import LiveReplica
from shoal.serving.balance.slot import Slot
from shoal.serving.proxy.reply import ProxyReply
from shoal.serving.proxy.upstream import ConnectionSeeker, ReplyHandler, Upstream

GATEWAY_ERRORS = frozenset({502, 503, 504})
"""Statuses that mean that the replica cannot serve the request."""


class LateRequest(ReplyHandler, Protocol):
    """The request, which waits in its first replica."""

    account: CallerAccount
    entry: RouteEntry

    def pick_second(self) -> LiveReplica | None:
        """Return another replica for the request, or None to give up hedging it."""
        ...

    def open(self, replica: LiveReplica, seeker: ConnectionSeeker) -> None: ...

    def message(self, replica: LiveReplica) -> bytes: ...

    def move_to(self, slot: Slot, up: Upstream) -> None:
        """Leave the current replica and continue in this slot, on this connection."""
        ...


class Hedge:
    __slots__ = ("_has_request", "_is_unwanted", "_late", "_slot", "_timer", "_up")

    is_upgrade = False
    is_whole = True

    def __init__(self, late: LateRequest, after_s: float) -> None:
        self._late = late
        self._slot: Slot | None = None
        """Taken in the second replica, until it is given back or handed over."""
        self._up: Upstream | None = None
        self._has_request = False
        """The request has moved here. Its connection continues to report to this object."""
        self._is_unwanted = False
        """The second replica replied that it cannot serve the request."""
        self._timer = asyncio.get_running_loop().call_later(after_s, self._begin)

    @property
    def is_head(self) -> bool:
        return self._late.is_head

    def _begin(self) -> None:
        replica = self._late.pick_second()
        if replica is None:
            return
        self._slot = Slot(replica, self._late.account)
        if replica.idle:
            self._send(replica.idle.pop())
        else:
            self._late.open(replica, self)

    def on_connected(self, up: Upstream) -> None:
        if self._slot is None:
            up.close()
        else:
            self._send(up)

    def on_refused(self, replica: LiveReplica, *, is_local: bool = False) -> None:
        if self._slot is not None:
            self.end()
            if not is_local:
                self._count_failure(replica, is_refused=True)

    def _send(self, up: Upstream) -> None:
        self._up = up
        up.send(self, self._late.message(up.replica))

    def _count_failure(self, replica: LiveReplica, *, is_refused: bool = False) -> None:
        self._late.entry.service.count_failure(replica, monotonic(), is_refused=is_refused)

    def take_over(self) -> bool:
        """Use the second replica, because the first is lost. Return False if the second has no request."""
        if self._slot is None or self._up is None or self._is_unwanted:
            self.end()
            return False
        self._move(self._slot, self._up)
        return True

    def end(self) -> None:
        """Cancel the hedge. Idempotent."""
        self._timer.cancel()
        slot, self._slot = self._slot, None
        if slot is None:
            return
        slot.release()
        if self._up is not None:
            self._up.close()
            self._up = None
        service = self._late.entry.service
        if service.waiting.count:
            service.pump()

    def _move(self, slot: Slot, up: Upstream) -> None:
        self._slot = None
        self._has_request = True
        self._late.move_to(slot, up)

    # Called by the connection to the second replica.

    def on_reply(self, reply: ProxyReply, body: bytes) -> None:
        if self._slot is not None and self._up is not None:
            if reply.status in GATEWAY_ERRORS:
                self._is_unwanted = True  # the first replica may still do better
                self._count_failure(self._up.replica)
                return
            self._move(self._slot, self._up)
        self._late.on_reply(reply, body)

    def on_data(self, data: bytes, num_chunks: int = 1) -> None:
        if self._has_request:
            self._late.on_data(data, num_chunks)

    def on_end(self) -> None:
        if self._has_request:
            self._late.on_end()
        else:
            self._up = None  # the connection is idle now and may be reused
            self.end()

    def on_lost(self, reason: str) -> None:
        if self._has_request:
            self._late.on_lost(reason)
            return
        slot, self._up = self._slot, None
        self.end()
        if slot is not None:
            self._count_failure(slot.replica)

    def on_stalled(self) -> None:
        self._late.on_stalled()

    def on_resumed(self) -> None:
        self._late.on_resumed()
