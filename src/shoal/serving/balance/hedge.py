"""Hedging: a late request goes to a second replica as well. The first reply wins; the other request is cut
off.

A hedge counts what it takes of its replica, and gives it back exactly once or hands it over with the
request.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from shoal.serving.admission.accounts import CallerAccount
from shoal.serving.admission.routes import RouteEntry
from shoal.serving.balance.replica import LiveReplica
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

    def move_to(self, replica: LiveReplica, up: Upstream) -> None:
        """Leave the current replica for this one and take over its slot."""
        ...

    def count_replica_failure(self, replica: LiveReplica, *, is_refused: bool = False) -> None: ...


class Hedge:
    __slots__ = ("_has_request", "_is_unwanted", "_late", "_timer", "_up", "is_head", "replica")

    is_upgrade = False
    is_whole = True

    def __init__(self, late: LateRequest, after_s: float) -> None:
        self._late = late
        self.is_head = late.is_head
        self.replica: LiveReplica | None = None
        self._up: Upstream | None = None
        self._has_request = False
        self._is_unwanted = False
        self._timer = asyncio.get_running_loop().call_later(after_s, self._begin)

    def _begin(self) -> None:
        replica = self.replica = self._late.pick_second()
        if replica is None:
            return
        replica.outstanding += 1
        replica.tally.in_flight += 1
        self._late.account.bound += 1
        if replica.idle:
            self._send(replica.idle.pop())
        else:
            self._late.open(replica, self)

    def on_connected(self, up: Upstream) -> None:
        if self.replica is up.replica:
            self._send(up)
        else:
            up.close()

    def on_refused(self, replica: LiveReplica, *, is_local: bool = False) -> None:
        if self.replica is replica:
            self.end()
            if not is_local:
                self._late.count_replica_failure(replica, is_refused=True)

    def _send(self, up: Upstream) -> None:
        self._up = up
        up.send(self, self._late.message(up.replica))

    def take_over(self) -> bool:
        """Use the second replica, because the first is lost. Return False if the second has no request."""
        if self._up is None or self._is_unwanted:
            self.end()
            return False
        self._move(self._up)
        return True

    def end(self) -> None:
        """Cancel the hedge. Idempotent."""
        self._timer.cancel()
        replica, self.replica = self.replica, None
        if replica is None or self._has_request:
            return
        replica.outstanding -= 1
        replica.tally.in_flight -= 1
        self._late.account.bound -= 1
        if self._up is not None:
            self._up.close()
            self._up = None
        service = self._late.entry.service
        if service.waiting.count:
            service.pump()

    def _move(self, up: Upstream) -> None:
        self._has_request = True
        self._late.move_to(up.replica, up)

    # Called by the connection to the second replica.

    def on_reply(self, reply: ProxyReply, body: bytes, *, is_whole: bool) -> None:
        if not self._has_request and self._up is not None:
            if reply.status in GATEWAY_ERRORS:
                self._is_unwanted = True  # the first replica may still do better
                self._late.count_replica_failure(self._up.replica)
                return
            self._move(self._up)
        self._late.on_reply(reply, body, is_whole=is_whole)

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
        replica, self._up = self.replica, None
        self.end()
        if replica is not None:
            self._late.count_replica_failure(replica)

    def hold(self) -> None:
        self._late.hold()

    def resume(self) -> None:
        self._late.resume()
