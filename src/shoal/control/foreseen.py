"""What was said of starts that are yet to come, and what is learned of it when they do. Only in memory."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from shoal.errors import LimitReached
from shoal.scheduler.calibration import Calibration, Interval
from shoal.scheduler.predict import Span

MAX_PENDING = 10_000
"""Outlooks that are remembered until their jobs start; of more, the oldest are forgotten."""

MAX_ASKING = 8
"""Questions that wait for the one that is being answered: seconds. More are turned away."""
MAX_EACH = 3
"""Of one person, the one that is being answered among them: so nobody's script turns the others away."""
TOO_MANY = "wait to be answered; this one is too many"
AGAIN = "ask again in a few seconds"


class _Said(NamedTuple):
    at: float
    span: Span
    interval: Interval


class Foreseen:
    """A job counts once, by what was said of it first: who asks every second learns no more than others."""

    def __init__(self) -> None:
        self.calibration = Calibration()
        self._turn = asyncio.Lock()
        self._asking: Counter[str] = Counter()
        """By who asks."""
        self._said: dict[str, _Said] = {}

    def __contains__(self, attempt_id: str) -> bool:
        return attempt_id in self._said

    @property
    def is_idle(self) -> bool:
        return not self._asking

    @asynccontextmanager
    async def one_at_a_time(self, who: str) -> AsyncIterator[None]:
        """Around whatever takes a thread for itself. `LimitReached` when too many wait for that already, or
        too many of theirs.
        """
        if self._asking.total() > MAX_ASKING:
            raise LimitReached(f"{MAX_ASKING} questions about starts {TOO_MANY}", hint=AGAIN)
        if self._asking[who] >= MAX_EACH:
            raise LimitReached(f"{MAX_EACH} of your questions about starts {TOO_MANY}", hint=AGAIN)
        self._asking[who] += 1
        try:
            async with self._turn:
                yield
        finally:
            self._asking[who] -= 1
            self._asking += Counter()  # forgets whoever has none left

    def say(self, attempt_id: str, span: Span, interval: Interval, now: float) -> None:
        if attempt_id in self._said:
            return
        if len(self._said) >= MAX_PENDING:
            del self._said[next(iter(self._said))]
        self._said[attempt_id] = _Said(now, span, interval)

    def started(self, attempt_id: str, now: float) -> None:
        said = self._said.pop(attempt_id, None)
        if said is not None:
            self.calibration.note(said.span, said.interval, now - said.at)
