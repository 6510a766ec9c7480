"""Changes on their way to the writer: first come, first served, but for those whose callers have patience.

Whoever submits jobs faster than they can be started gains nothing by it, and the ends that would make room
and the plans that would use it would wait behind. So submissions let those pass, and what runs goes on.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any, NamedTuple

from shoal.clock import Clock
from shoal.errors import StoreUnavailable
from shoal.store.transaction import Tx


class Change(NamedTuple):
    fn: Callable[[Tx], Any]
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Any]
    patience_s: float = 0.0
    """For so long it lets others pass."""


class Line:
    """Any thread puts, one takes."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._door = threading.Condition()
        self._waiting: list[tuple[float, int, Change]] = []
        """By the moment until which each lets others pass, then by arrival."""
        self._arrivals = count()
        self._is_closed = False

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    @property
    def is_over(self) -> bool:
        """Nothing comes in any more, and nothing is left: one may have come right before it was closed."""
        return self._is_closed and self.is_empty

    def put(self, change: Change) -> None:
        with self._door:
            if self._is_closed:
                raise StoreUnavailable("the store is closed")
            heappush(
                self._waiting, (self._clock.monotonic() + change.patience_s, next(self._arrivals), change)
            )
            self._door.notify()

    def close(self) -> None:
        """Nothing comes in any more; what did is still taken out."""
        with self._door:
            self._is_closed = True
            self._door.notify()

    def wait(self, timeout_s: float | None) -> Change | None:
        """The next, as soon as there is one; None when the time is over first, or it is closed and empty."""
        with self._door:
            self._door.wait_for(lambda: self._waiting or self._is_closed, timeout_s)
            return self._take()

    def take(self, until: float = inf) -> Change | None:
        """The next, if there is one that lets others pass no longer than until then."""
        with self._door:
            return self._take() if self._waiting and self._waiting[0][0] <= until else None

    def _take(self) -> Change | None:
        return heappop(self._waiting)[2] if self._waiting else None
