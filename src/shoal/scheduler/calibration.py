"""From what scenarios span to an interval that holds as often as it says: learned from foreseen starts.

Scenarios know nothing of jobs yet to come. How far starts fall outside them, as a ratio of waits, is much the
same for long and short waits, so what was seen of the last few hundred says how far to widen the next. On
top of that the share that is widened for follows what was missed: whatever changes, in the long run one in
twenty starts before the interval and one in twenty after it. (Conformal quantiles with adaptive levels.)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from math import ceil, exp, log
from typing import NamedTuple

from shoal.scheduler.predict import Span

COVERAGE = 0.9
EACH = (1.0 - COVERAGE) / 2
"""The share that may start too early for the interval, and the share that may start too late."""
BASE_S = 60.0
"""Waits are compared as ratios once they are longer than about this."""
TICK_S = 1.0
"""No interval is narrower than this on each side: where all is known in advance, rounding is no surprise."""
NUM_KEPT = 500
NUM_ENOUGH = 40
"""Before so many starts were foreseen, the two ratios below stand for them."""
RATIO_BEFORE, RATIO_AFTER = 1.0, 1.8
"""What the KTH log comes to; the other logs are tests of that."""
RATE = 0.01
"""How fast levels follow misses: a miss moves them by as much as twenty hits move them back."""
LEAST, MOST = 0.002, 0.3


class Interval(NamedTuple):
    """Seconds from the moment it was asked for. Holds with the probability `COVERAGE`."""

    low_s: float
    high_s: float


class Calibration:
    """Notes come in the order of starts. Costs microseconds; what it has learned is small and may be lost."""

    def __init__(self) -> None:
        self._before = _Side(log(RATIO_BEFORE))
        self._after = _Side(log(RATIO_AFTER))

    @property
    def num_starts(self) -> int:
        """Those that intervals go by now: the last few hundred at most."""
        return len(self._after)

    def interval(self, span: Span) -> Interval:
        low_s = _waits(_scale(span.low_s) - self._before.margin())
        high_s = _waits(_scale(span.high_s) + self._after.margin())
        if low_s > high_s:
            low_s = high_s = (low_s + high_s) / 2
        return Interval(max(low_s - TICK_S, 0.0), high_s + TICK_S)

    def note(self, span: Span, given: Interval, waited_s: float) -> None:
        """It started so long after it was asked for; `given` is what was said then."""
        waited = _scale(waited_s)
        self._before.note(_scale(span.low_s) - waited, is_missed=waited_s < given.low_s)
        self._after.note(waited - _scale(span.high_s), is_missed=waited_s > given.high_s)


class _Side:
    """How far starts fell outside on one side, as logarithms of ratios; inside is negative."""

    def __init__(self, at_first: float) -> None:
        self._at_first = at_first
        self._recent: deque[float] = deque()
        self._ordered: list[float] = []
        self._level = EACH

    def __len__(self) -> int:
        return len(self._ordered)

    def margin(self) -> float:
        count = len(self._ordered)
        if count < NUM_ENOUGH:
            return self._at_first
        return self._ordered[min(ceil((count + 1) * (1.0 - self._level)), count) - 1]

    def note(self, outside: float, *, is_missed: bool) -> None:
        self._recent.append(outside)
        insort(self._ordered, outside)
        if len(self._recent) > NUM_KEPT:
            del self._ordered[bisect_left(self._ordered, self._recent.popleft())]
        self._level = min(max(self._level + RATE * (EACH - is_missed), LEAST), MOST)


def _scale(waits_s: float) -> float:
    return log(max(waits_s, 0.0) + BASE_S)


def _waits(scaled: float) -> float:
    return max(exp(scaled) - BASE_S, 0.0)
