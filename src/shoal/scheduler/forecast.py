"""How long a run will take, learned from the runs that have ended before.

Nothing is fitted and nothing is random: the same runs noted in the same order give the same answers, so a
replay expects what the cluster expected. Memory is bounded; kinds of runs not seen for longest are forgotten.
Its answers order and inform. What is promised to a waiting job rests on time limits alone.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Hashable
from functools import lru_cache
from math import log2, sqrt

import msgspec

from shoal.scheduler.expectation import Expectation, Spread

NUM_RECENT = 4
"""Runs of one kind that the expected time is a mean of: people change what they run from day to day."""
NUM_KEPT = 32
"""Runs of one kind that quantiles are taken from. Those of all kinds that a run belongs to are put together:
the nearest count several times, and a user who begins something new is no surprise. On four logs 84 to 93 %
of runs lie between the 5th and the 95th percentile; with the narrowest kind alone, 77 to 86 %."""
PRIOR_RUNS = 0.5
"""How many runs of a kind the wider kind's mean counts for. One run of the kind itself outweighs it."""
SHORTEST_S = 10.0
"""Runs count as at least this long, as in bounded slowdown: 1 s or 9 s makes no difference to an order."""
UNKNOWN_S = 3600.0
"""Expected of the first run of all, where it has no limit."""
NUM_SHARES = 64
"""Of this many last runs all but the worst must have used a share of their limits for it to count as sure."""
MAX_KINDS = 50_000
"""About 25 MB when all are full."""

# Kinds of everybody's runs: these, and a number for limits alike. All others are tuples.
ANY = "any"
LIMITED = "limited"


class Ask(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """What is known of a run before it starts, as far as it tells anything about its length."""

    user: str | None = None
    project: str | None = None
    name: str | None = None
    shape: Hashable = None
    """Amounts of nodes, GPUs and CPUs, say; only ever compared."""
    limit_s: float | None = None


class _Kind:
    """Runs that were alike: their lengths, and the mean square root of the last few.

    The mean of square roots lies between the geometric and the arithmetic mean. One run that failed at once
    among long ones moves the first too far, one long run among short ones the second.
    """

    __slots__ = ("mean_root", "num_recent", "values")

    def __init__(self) -> None:
        self.values = array("d")
        self.mean_root = 0.0
        self.num_recent = 0
        """0: the mean is not that of these values."""

    def note(self, value: float) -> None:
        self.values.append(value)
        if len(self.values) > NUM_KEPT:
            del self.values[0]
        self.num_recent = 0

    def runs(self, limit_s: float | None) -> tuple[float, ...]:
        """Lengths, of a kind whose values are shares of a limit if there is one."""
        return tuple(self.values) if limit_s is None else tuple([value * limit_s for value in self.values])

    def refresh(self) -> int:
        """Notes only mark the mean as old: there are six for every run, and fewer questions. Returns of how
        many runs it is.
        """
        recent = self.values[-NUM_RECENT:]
        self.num_recent = num = len(recent)
        self.mean_root = sum(map(sqrt, recent)) / num
        return num


class Forecast:
    """Learns from each run that ends and says what to expect of the next. Calls take a few microseconds."""

    def __init__(self, *, max_kinds: int = MAX_KINDS) -> None:
        self._max_kinds = max_kinds
        self._kinds: dict[Hashable, _Kind] = {}
        """In the order of their last note: the first is forgotten first."""
        self._shares: deque[float] = deque(maxlen=NUM_SHARES)
        self._sure_share: float | None = 0.0
        """None: to be found anew."""

    def note(self, ask: Ask, run_s: float) -> None:
        """A run has ended, by itself or at its limit. One that somebody stopped says little: leave it out."""
        length = max(run_s, SHORTEST_S)
        self._note(_exact(ask), length)
        if ask.limit_s is None:
            self._note(_wide(None), length)
            return
        share = max(run_s, 0.0) / ask.limit_s
        self._note(_wide(ask.limit_s), share)
        self._shares.append(share)
        self._sure_share = None

    def expect(self, ask: Ask) -> Expectation:
        """What the runs noted so far say of this one. Never above its limit."""
        limit_s, kinds = ask.limit_s, self._kinds
        root, unit = _prior(limit_s)
        for scale, keys in ((unit, _wide(limit_s)), (1.0, _exact(ask))):
            for key in keys:
                kind = kinds.get(key)
                if kind is not None:
                    num = kind.num_recent or kind.refresh()
                    root = (num * kind.mean_root * scale + PRIOR_RUNS * root) / (num + PRIOR_RUNS)
        expected_s = float(max(1, int(root * root + 0.5)))
        if limit_s is None:
            return Expectation(expected_s=expected_s, sure_s=0.0)
        return Expectation(expected_s=min(expected_s, limit_s), sure_s=self._sure() * limit_s)

    def spread(self, ask: Ask) -> Spread:
        """Quantiles of the run. Takes longer than `expect`: for those who ask, not for every submission."""
        return Spread(expected_s=self.expect(ask).expected_s, limit_s=ask.limit_s, runs=self.runs(ask))

    def runs(self, ask: Ask) -> tuple[float, ...]:
        """Lengths of runs alike, the nearest several times. Changes nothing: any thread may ask."""
        runs: tuple[float, ...] = ()
        for key in _wide(ask.limit_s):
            kind = self._kinds.get(key)
            runs = runs if kind is None else kind.runs(ask.limit_s)
        for key in _exact(ask):
            kind = self._kinds.get(key)
            if kind is not None:
                runs += tuple(kind.values)
        return runs

    @property
    def num_kinds(self) -> int:
        return len(self._kinds)

    def _sure(self) -> float:
        """The share of its limit that every run but one used lately; 0 until there are enough of them."""
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
    """The root of what is expected where nothing is known, and the unit of wide kinds' roots."""
    if limit_s is None:
        return sqrt(UNKNOWN_S), 1.0
    return sqrt(max(limit_s, SHORTEST_S)), sqrt(limit_s)


@lru_cache(maxsize=1 << 12)
def _wide(limit_s: float | None) -> tuple[Hashable, ...]:
    """Kinds of everybody's runs, widest first: by the share of the limit that was used, if there is one."""
    return (ANY,) if limit_s is None else (LIMITED, _octave(limit_s))


@lru_cache(maxsize=1 << 13)
def _exact(ask: Ask) -> tuple[Hashable, ...]:
    """Kinds of one user's runs, widest first; of the project's where no limit tells more than that."""
    keys: list[Hashable] = []
    if ask.project is not None and ask.limit_s is None:
        keys.append((None, ask.project))
    user = ask.user
    if user is not None:
        keys += [(user,), (user, ask.limit_s), (user, ask.limit_s, ask.shape)]
        if ask.name is not None:
            keys.append((user, ask.limit_s, ask.shape, ask.name))
    return tuple(keys)


def _octave(limit_s: float) -> int:
    """Limits within a factor of about 1.4 of each other are alike."""
    return int(log2(limit_s + 1) * 2)
