"""Widen a span of scenario starts to an interval that holds as often as it claims, learned from predicted
starts.

Scenarios contain no jobs that are submitted later. How far real starts fall outside them, as a ratio of
waits, is much the same for long and short waits. So the last few hundred starts say how far to widen the next
span. In addition, the share of starts left outside follows the misses: whatever changes, in the long run one
in twenty starts before the interval and one in twenty after it. (Conformal quantiles with adaptive levels.)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from math import ceil, exp, log
from typing import NamedTuple

from shoal.scheduler.prediction.scenarios import StartSpan

COVERAGE = 0.9
TAIL_SHARE = (1.0 - COVERAGE) / 2
"""The share of jobs that may start before the interval, and the share that may start after it."""
BASE_S = 60.0
"""Waits are compared as ratios once they are longer than about this."""
TICK_S = 1.0
"""No interval is narrower than this on each side, so that rounding never counts as a miss when everything is
known in advance."""
MAX_NOTES = 500
NUM_ENOUGH = 40
"""Until this many predicted starts were seen, the two ratios below are used instead."""
RATIO_BEFORE, RATIO_AFTER = 1.0, 1.8
"""The ratios of the KTH log. The other logs test them."""
RATE = 0.01
"""How fast levels follow misses. A miss moves a level as much as twenty hits move it back."""
MIN_LEVEL, MAX_LEVEL = 0.002, 0.3


class Interval(NamedTuple):
    """Seconds from the time of the question. Holds with the probability `COVERAGE`."""

    low_s: float
    high_s: float


class Calibration:
    """Notes come in the order of starts. A note costs microseconds. What it has learned is small and may be
    lost.
    """

    def __init__(self) -> None:
        self._before = _Tail(log(RATIO_BEFORE))
        self._after = _Tail(log(RATIO_AFTER))

    @property
    def num_starts(self) -> int:
        """The number of starts that intervals are based on now: the last few hundred at most."""
        return len(self._after)

    def interval(self, span: StartSpan) -> Interval:
        low_s = _waits(_scale(span.low_s) - self._before.margin())
        high_s = _waits(_scale(span.high_s) + self._after.margin())
        if low_s > high_s:
            low_s = high_s = (low_s + high_s) / 2
        return Interval(max(low_s - TICK_S, 0.0), high_s + TICK_S)

    def note(self, span: StartSpan, interval: Interval, waited_s: float) -> None:
        """The job started `waited_s` after the question; `interval` is what was answered then."""
        waited = _scale(waited_s)
        self._before.note(_scale(span.low_s) - waited, is_missed=waited_s < interval.low_s)
        self._after.note(waited - _scale(span.high_s), is_missed=waited_s > interval.high_s)


class _Tail:
    """How far starts fell outside on one side, as logarithms of ratios. Inside is negative."""

    def __init__(self, at_first: float) -> None:
        self._at_first = at_first
        self._recent: deque[float] = deque()
        self._ordered: list[float] = []
        self._level = TAIL_SHARE

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
        if len(self._recent) > MAX_NOTES:
            del self._ordered[bisect_left(self._ordered, self._recent.popleft())]
        self._level = min(max(self._level + RATE * (TAIL_SHARE - is_missed), MIN_LEVEL), MAX_LEVEL)


def _scale(waits_s: float) -> float:
    return log(max(waits_s, 0.0) + BASE_S)


def _waits(scaled: float) -> float:
    return max(exp(scaled) - BASE_S, 0.0)
