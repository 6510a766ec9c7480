"""How long a run will take, learned from the runs that have ended before.

An `Expectation` is one time that orders candidates. A `RunTimeSpread` has quantiles, which say when things
will happen.

Nothing is fitted and nothing is random: the same runs noted in the same order give the same answers, so a
replay expects what the cluster expected. Memory is bounded, and the kinds of runs that were not seen for
longest are forgotten. The answers order jobs and inform people. What is promised to a waiting job rests on
time limits alone.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Hashable, Sequence
from functools import lru_cache
from math import log2, sqrt

import msgspec


class Expectation(msgspec.Struct, frozen=True, kw_only=True):
    """What the order of candidates needs."""

    expected_s: float
    """Whole seconds, at least 1. The limit, if that is less."""
    sure_s: float
    """Nearly every recent run took at least this share of its limit. 0 if limits say little."""


class RunTimeSpread(msgspec.Struct, frozen=True, kw_only=True):
    """What a statement about times needs: how far the run may be from its expected time."""

    expected_s: float
    limit_s: float | None
    runs: tuple[float, ...]
    """Lengths of similar runs; the most similar ones appear several times. Empty: there was none."""

    def quantile(self, quantile: float, *, elapsed_s: float = 0.0) -> float:
        """Return the run time that is not exceeded with this probability, given that it has run for
        `elapsed_s`.
        """
        return self.quantiles((quantile,), elapsed_s=elapsed_s)[0]

    def quantiles(self, quantiles: Sequence[float], *, elapsed_s: float = 0.0) -> tuple[float, ...]:
        """Return the same for several probabilities.

        Never below `elapsed_s`, and never above the limit unless the run is past it already. If a run has
        outlasted all similar runs, it is expected to end at any time between now and its limit. Without a
        limit, it is expected to end before it is twice as old, or twice its expected time.
        """
        limit_s = self.limit_s
        if limit_s is not None and elapsed_s >= limit_s:
            return (elapsed_s,) * len(quantiles)
        ceiling_s = 2 * max(elapsed_s, self.expected_s) if limit_s is None else limit_s
        longer_runs = sorted([run for run in self.runs if run > elapsed_s])
        if limit_s is None:
            ceiling_s = max([ceiling_s, *longer_runs[-1:]])
        points = [elapsed_s, *[min(run, ceiling_s) for run in longer_runs], ceiling_s]
        return tuple([_between(points, quantile) for quantile in quantiles])


def _between(points: Sequence[float], quantile: float) -> float:
    position = quantile * (len(points) - 1)
    index = min(int(position), len(points) - 2)
    below, above = points[index], points[index + 1]
    return min(max(below + (position - index) * (above - below), below), above)


NUM_RECENT = 4
"""Runs of one kind whose mean is the expected time. Users change what they run from day to day."""
MAX_RUNS_PER_KIND = 32
"""Runs of one kind that quantiles are taken from. The runs of all kinds that a run belongs to are put
together. So the most similar runs count several times, and a user who begins something new does not distort
the result. On four logs 84 to 93 % of runs lie between the 5th and the 95th percentile; with the narrowest
kind alone, 77 to 86 %."""
PRIOR_RUNS = 0.5
"""How many runs of a kind the wider kind's mean counts for. One run of the kind itself outweighs it."""
SHORTEST_S = 10.0
"""Runs count as at least this long, as in bounded slowdown: 1 s or 9 s makes no difference to an order."""
UNKNOWN_S = 3600.0
"""Expected of the very first run, if it has no limit."""
NUM_SHARES = 64
"""Of this many last runs, all but the worst must have used a share of their limits for it to count as
sure."""
MAX_KINDS = 50_000
"""About 25 MB when all are full."""

# Kinds of all users' runs: these two, and a number for similar limits. All other kinds are tuples.
ANY = "any"
LIMITED = "limited"


class RunFeatures(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """What is known of a run before it starts and tells something about its length."""

    user: str | None = None
    project: str | None = None
    name: str | None = None
    shape: Hashable = None
    """Amounts of nodes, GPUs and CPUs, for example. Only compared for equality."""
    limit_s: float | None = None


class _Kind:
    """Similar runs: their lengths, and the mean square root of the last few.

    The mean of square roots lies between the geometric and the arithmetic mean. One run that failed at once
    among long ones moves the geometric mean too far, and one long run among short ones the arithmetic mean.
    """

    __slots__ = ("mean_root", "num_recent", "values")

    def __init__(self) -> None:
        self.values = array("d")
        self.mean_root = 0.0
        self.num_recent = 0
        """0: the mean is stale."""

    def note(self, value: float) -> None:
        self.values.append(value)
        if len(self.values) > MAX_RUNS_PER_KIND:
            del self.values[0]
        self.num_recent = 0

    def runs(self, limit_s: float | None) -> tuple[float, ...]:
        """Return the lengths. With a limit, the values of the kind are shares of a limit."""
        return tuple(self.values) if limit_s is None else tuple([value * limit_s for value in self.values])

    def refresh(self) -> int:
        """Compute the mean and return the number of runs in it.

        Notes only mark the mean as stale, because there are six notes per run and fewer questions.
        """
        recent = self.values[-NUM_RECENT:]
        self.num_recent = num = len(recent)
        self.mean_root = sum(map(sqrt, recent)) / num
        return num


class Forecast:
    """Learns from each run that ends, and says what to expect of the next. Calls take a few microseconds."""

    def __init__(self, *, max_kinds: int = MAX_KINDS) -> None:
        self._max_kinds = max_kinds
        self._kinds: dict[Hashable, _Kind] = {}
        """In the order of their last note: the first is forgotten first."""
        self._shares: deque[float] = deque(maxlen=NUM_SHARES)
        self._sure_share: float | None = 0.0
        """None: must be computed again."""

    def note(self, features: RunFeatures, run_s: float) -> None:
        """Record a run that ended by itself or at its limit. A run that a person stopped says little: do not
        record it.
        """
        length = max(run_s, SHORTEST_S)
        self._note(_exact(features), length)
        if features.limit_s is None:
            self._note(_wide(None), length)
            return
        share = max(run_s, 0.0) / features.limit_s
        self._note(_wide(features.limit_s), share)
        self._shares.append(share)
        self._sure_share = None

    def expect(self, features: RunFeatures) -> Expectation:
        """Return what the recorded runs say of this one. Never above its limit."""
        limit_s, kinds = features.limit_s, self._kinds
        root, unit = _prior(limit_s)
        for scale, keys in ((unit, _wide(limit_s)), (1.0, _exact(features))):
            for key in keys:
                kind = kinds.get(key)
                if kind is not None:
                    num = kind.num_recent or kind.refresh()
                    root = (num * kind.mean_root * scale + PRIOR_RUNS * root) / (num + PRIOR_RUNS)
        expected_s = float(max(1, int(root * root + 0.5)))
        if limit_s is None:
            return Expectation(expected_s=expected_s, sure_s=0.0)
        return Expectation(expected_s=min(expected_s, limit_s), sure_s=self._sure() * limit_s)

    def spread(self, features: RunFeatures) -> RunTimeSpread:
        """Return quantiles of the run. Slower than `expect`: meant for queries, not for every submission."""
        return RunTimeSpread(
            expected_s=self.expect(features).expected_s, limit_s=features.limit_s, runs=self.runs(features)
        )

    def runs(self, features: RunFeatures) -> tuple[float, ...]:
        """Return lengths of similar runs, the most similar several times. Changes nothing, so any thread may
        call it.
        """
        runs: tuple[float, ...] = ()
        for key in _wide(features.limit_s):
            kind = self._kinds.get(key)
            runs = runs if kind is None else kind.runs(features.limit_s)
        for key in _exact(features):
            kind = self._kinds.get(key)
            if kind is not None:
                runs += tuple(kind.values)
        return runs

    @property
    def num_kinds(self) -> int:
        return len(self._kinds)

    def _sure(self) -> float:
        """Return the share of its limit that every recent run but one used; 0 until there are enough runs."""
        if self._sure_share is None:
            is_full = len(self._shares) == NUM_SHARES
            self._sure_share = min(sorted(self._shares)[1], 1.0) if is_full else 0.0
        return self._sure_share

    def _note(self, keys: tuple[Hashable, ...], value: float) -> None:
        kinds = self._kinds
        for key in keys:
            kind = kinds.pop(key, None)
            if kind is None:
                kind = _Kind()
                if len(kinds) >= self._max_kinds:
                    del kinds[next(iter(kinds))]
            kinds[key] = kind
            kind.note(value)


def _prior(limit_s: float | None) -> tuple[float, float]:
    """Return the root of the expected time if nothing is known, and the unit of wide kinds' roots."""
    if limit_s is None:
        return sqrt(UNKNOWN_S), 1.0
    return sqrt(max(limit_s, SHORTEST_S)), sqrt(limit_s)


@lru_cache(maxsize=1 << 12)
def _wide(limit_s: float | None) -> tuple[Hashable, ...]:
    """Return kinds of all users' runs, widest first: by the share of the limit that was used, if there is a
    limit.
    """
    return (ANY,) if limit_s is None else (LIMITED, _octave(limit_s))


@lru_cache(maxsize=1 << 13)
def _exact(features: RunFeatures) -> tuple[Hashable, ...]:
    """Return kinds of one user's runs, widest first; also of the project's runs, if no limit says more than
    those.
    """
    keys: list[Hashable] = []
    if features.project is not None and features.limit_s is None:
        keys.append((None, features.project))
    user = features.user
    if user is not None:
        keys += [(user,), (user, features.limit_s), (user, features.limit_s, features.shape)]
        if features.name is not None:
            keys.append((user, features.limit_s, features.shape, features.name))
    return tuple(keys)


def _octave(limit_s: float) -> int:
    """Limits within a factor of about 1.4 of each other count as similar."""
    return int(log2(limit_s + 1) * 2)
