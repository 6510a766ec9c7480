"""A late request in a second replica, too: whoever begins to answer first has it, the other is cut off.

Counts what it takes of its replica, and gives it back exactly once or hands it over with the request.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from shoal.serving.accounts import Account
from shoal.serving.answer import Answer
from shoal.serving.replica import LiveReplica
from shoal.serving.route import Entry
from shoal.serving.upstream import Asker, Seeker, Upstream

GATEWAY_ERRORS = frozenset({502, 503, 504})
"""Answers that say that the replica cannot."""


class Late(Asker, Protocol):
    """The request, which waits in its first replica."""

    account: Account
    entry: Entry

    def second(self) -> LiveReplica | None:
        """Another one to ask; None: not now, and never mind."""
        ...

    def open(self, replica: LiveReplica, seeker: Seeker) -> None: ...

    def message(self, replica: LiveReplica) -> bytes: ...

    def move(self, replica: LiveReplica, up: Upstream) -> None:
        """Leave the replica that has it for this one, whose slot it takes over."""
        ...

    def failed(self, replica: LiveReplica, *, is_refused: bool = False) -> None: ...


class Hedge:
    __slots__ = ("_has_request", "_is_unwanted", "_late", "_timer", "_up", "is_head", "replica")

    is_upgrade = False
    is_whole = True

    def __init__(self, late: Late, after_s: float) -> None:
        self._late = late
        self.is_head = late.is_head
        self.replica: LiveReplica | None = None
        self._up: Upstream | None = None
        self._has_request = False
        self._is_unwanted = False
        self._timer = asyncio.get_running_loop().call_later(after_s, self._begin)

    def _begin(self) -> None:
        replica = self.replica = self._late.second()
        if replica is None:
            return
        replica.outstanding += 1
        replica.tally.in_flight += 1
        self._late.account.bound += 1
        if replica.idle:
            self._send(replica.idle.pop())
        else:
            self._late.open(replica, self)

    def connected(self, up: Upstream) -> None:
        if self.replica is up.replica:
            self._send(up)
        else:
            up.close()

    def on_refused(self, replica: LiveReplica, *, is_ours: bool = False) -> None:
        if self.replica is replica:
            self.end()
            if not is_ours:
                self._late.failed(replica, is_refused=True)

    def _send(self, up: Upstream) -> None:
        self._up = up
        up.send(self, self._late.message(up.replica))

    def take_over(self) -> bool:
        """The first one is lost. False: it was not asked of a second."""
        if self._up is None or self._is_unwanted:
            self.end()
            return False
        self._move(self._up)
        return True

    def end(self) -> None:
        """It is not needed any more. May be repeated."""
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
        self._late.move(up.replica, up)

    # From the second replica.

    def on_answer(self, answer: Answer, body: bytes, *, is_whole: bool) -> None:
        if not self._has_request and self._up is not None:
            if answer.status in GATEWAY_ERRORS:
                self._is_unwanted = True  # the first one may still do better
                self._late.failed(self._up.replica)
                return
            self._move(self._up)
        self._late.on_answer(answer, body, is_whole=is_whole)

    def on_data(self, data: bytes, num_chunks: int = 1) -> None:
        if self._has_request:
            self._late.on_data(data, num_chunks)

    def on_end(self) -> None:
        if self._has_request:
            self._late.on_end()
        else:
            self._up = None  # it is idle by now, and may be used again
            self.end()

    def on_lost(self, reason: str) -> None:
        if self._has_request:
            self._late.on_lost(reason)
            return
        replica, self._up = self.replica, None
        self.end()
        if replica is not None:
            self._late.failed(replica)

    def hold(self) -> None:
        self._late.hold()

    def resume(self) -> None:
        self._late.resume()
