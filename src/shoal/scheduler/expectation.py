"""What is expected of one run: a time to order by, and quantiles for saying when things will happen."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Expectation(msgspec.Struct, frozen=True, kw_only=True):
    """What an order needs."""

    expected_s: float
    """Whole seconds, at least 1; the limit where that is less."""
    sure_s: float
    """Nearly every run of late took at least this share of its limit. 0 where limits say little."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """What a statement about times needs: how far the run may be from what is expected."""

    expected_s: float
    limit_s: float | None
    runs: tuple[float, ...]
    """Lengths of runs that were alike, the nearest several times. Empty: none was."""

    def quantile(self, quantile: float, *, elapsed_s: float = 0.0) -> float:
        """The run time that is not exceeded with this probability, given that it has run for `elapsed_s`."""
        return self.quantiles((quantile,), elapsed_s=elapsed_s)[0]

    def quantiles(self, quantiles: Sequence[float], *, elapsed_s: float = 0.0) -> tuple[float, ...]:
        """The same for several.

        Never below `elapsed_s`, and never above the limit unless the run is past that already. A run that
        has outlasted all its like is taken to end anywhere between now and its limit, or, without one,
        before it is twice as old (or as expected).
        """
        limit_s = self.limit_s
        if limit_s is not None and elapsed_s >= limit_s:
            return (elapsed_s,) * len(quantiles)
        ceiling_s = 2 * max(elapsed_s, self.expected_s) if limit_s is None else limit_s
        longer = sorted([run for run in self.runs if run > elapsed_s])
        if limit_s is None:
            ceiling_s = max([ceiling_s, *longer[-1:]])
        points = [elapsed_s, *[min(run, ceiling_s) for run in longer], ceiling_s]
        return tuple([_between(points, quantile) for quantile in quantiles])


def _between(points: Sequence[float], quantile: float) -> float:
    place = quantile * (len(points) - 1)
    index = min(int(place), len(points) - 2)
    below, above = points[index], points[index + 1]
    return min(max(below + (place - index) * (above - below), below), above)
