"""Since when the engine cannot be asked: what it last said of its nodes is as old as that, or older.

In memory: who starts asks anew before anybody is answered, and says so where that takes long. When an engine
that never answered it had answered somebody before, nobody knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

import msgspec

from shoal.clock import Clock

MAX_WHY = 200
LATE_S = 3.0
"""People are told of a question that was not answered for so long. Its engine may give it up much later: a
Ray whose head is gone lets its callers wait, and so may one on a busy machine, which is given 20 s.
"""


class Outage(msgspec.Struct, frozen=True, kw_only=True):
    """An engine whose last answer did not come."""

    since: float
    """When the first question in a row that was in vain was asked."""
    has_answered: bool
    """Whether it had answered this control plane before: what is known of its nodes is as of `since` then."""
    why: str
    """The first line of what came instead."""


class Outages:
    """How the last look at the nodes went. Used on the event loop alone."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._has_answered = False
        self._asked: list[tuple[float, float]] = []
        """When each question that is on its way was asked: monotonic, and by the calendar."""
        self.present: Outage | None = None
        """What may be decided by: the last question was in vain."""

    @property
    def told(self) -> Outage | None:
        """What people are told: the present one, or that an answer is late. Nothing may be decided by that:
        who is late may answer yet.
        """
        asked, since = min(self._asked, default=(inf, inf))
        late_s = self._clock.monotonic() - asked
        if self.present is not None or late_s < LATE_S:
            return self.present
        why = f"no answer for {late_s:.0f} s so far"
        return Outage(since=since, has_answered=self._has_answered, why=why)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """A question is on its way for as long as the block lasts, in which its answer is noted."""
        asked = self._clock.monotonic(), self._clock.now()
        self._asked.append(asked)
        try:
            yield
        finally:
            self._asked.remove(asked)

    def answered(self) -> None:
        self._has_answered = True
        self.present = None

    def unanswered(self, error: str) -> None:
        asked_at = min((at for _, at in self._asked), default=self._clock.now())
        since = self.present.since if self.present else asked_at
        self.present = Outage(since=since, has_answered=self._has_answered, why=in_short(error))

    def awaited(self, told: str) -> None:
        """The first answer is on its way, or will never come: what is known until then is of before."""
        if not self._has_answered and self.present is None:
            self.unanswered(told)


def in_short(error: str) -> str:
    """The first line of an engine's words, if that is not too long."""
    first = next((line.strip() for line in error.splitlines() if line.strip()), "")
    return first if len(first) <= MAX_WHY else f"{first[: MAX_WHY - 3]}..."
