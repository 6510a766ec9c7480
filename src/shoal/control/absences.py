"""How long nodes have not been listed by an engine that answers: when that is no hiccup any more."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from shoal.clock import Clock

GONE_S = 600.0
"""A Slurm that reads its configuration, or a Ray whose head is back before its workers, lists some of its
nodes for seconds, at worst for minutes."""
FORGOTTEN_S = 86_400.0
"""Where machines come and go under ever new names, those that went must not pile up."""
MOST_S = 60.0
"""What one answer counts for: two an hour apart say nothing about the hour."""


class Absences:
    """By node, in seconds of answers that did not name it. In memory: who starts counts anew."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._answered_at: float | None = None
        self._absent_s: dict[str, float] = {}

    def answered(self, known: Iterable[str], listed: Collection[str]) -> None:
        """An engine that lists nobody is still coming up: that counts as no answer."""
        if not listed:
            self.unanswered()
            return
        now = self._clock.monotonic()
        since = min(now - self._answered_at, MOST_S) if self._answered_at is not None else 0.0
        self._answered_at = now
        before = self._absent_s
        self._absent_s = {
            name: before[name] + since if name in before else 0.0 for name in known if name not in listed
        }

    def unanswered(self) -> None:
        """The time until the next answer does not count."""
        self._answered_at = None

    def is_gone(self, name: str) -> bool:
        return self._absent_s.get(name, 0.0) >= GONE_S

    def is_long_gone(self, name: str) -> bool:
        return self._absent_s.get(name, 0.0) >= FORGOTTEN_S
