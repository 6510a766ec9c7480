"""Since when the engine cannot be asked: what it last said of its nodes is as old as that, or older.

In memory: who starts asks anew before anybody is answered, and says so where that takes long. When an engine
that never answered it had answered somebody before, nobody knows.
"""

from __future__ import annotations

import msgspec

from shoal.clock import Clock

MAX_WHY = 200


class Outage(msgspec.Struct, frozen=True, kw_only=True):
    """An engine whose last answer did not come."""

    since: float
    """When the first question in a row was in vain."""
    has_answered: bool
    """Whether it had answered this control plane before: what is known of its nodes is as of `since` then."""
    why: str
    """The first line of what came instead."""


class Outages:
    """How the last look at the nodes went."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._has_answered = False
        self.present: Outage | None = None

    def answered(self) -> None:
        self._has_answered = True
        self.present = None

    def unanswered(self, error: str) -> None:
        since = self.present.since if self.present else self._clock.now()
        self.present = Outage(since=since, has_answered=self._has_answered, why=in_short(error))

    def awaited(self, told: str) -> None:
        """The first answer is on its way, or will never come: what is known until then is of before."""
        if not self._has_answered and self.present is None:
            self.unanswered(told)


def in_short(error: str) -> str:
    """The first line of an engine's words, if that is not too long."""
    first = next((line.strip() for line in error.splitlines() if line.strip()), "")
    return first if len(first) <= MAX_WHY else f"{first[: MAX_WHY - 3]}..."
