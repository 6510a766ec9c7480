"""When waiting jobs will start: an interval from scenarios of how long everybody runs.

Each scenario is a future that the planner itself makes (`ahead`). In each, everybody's jobs run for another
quantile of their expected run times, and over all scenarios they have had each of them once; which in which
follows from the owner's name. So the same facts give the same interval; the jobs of one person are long or
short together, as a batch of them is, and those of two persons are not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import inf
from typing import NamedTuple
from zlib import crc32

from shoal.scheduler.ahead import Future, RunTime, look_ahead
from shoal.scheduler.expectation import Spread
from shoal.scheduler.policy import Policy
from shoal.scheduler.snapshot import Candidate, Holding, Snapshot

NUM_SCENARIOS = 11
"""A prime: steps through the quantiles of any length meet all of them."""
LEVELS = tuple((level + 0.5) / NUM_SCENARIOS for level in range(NUM_SCENARIOS))
MOST_WORK = 3000
"""Starts that may be planned for one prediction, in all scenarios together: about a quarter of a second."""
FACTS_A_START = 6
"""So many nodes, holdings and candidates are copied in the time that planning one start takes."""


Expect = Callable[[Candidate | Holding], Spread]
"""How long a run may take. Asked once for each job, in whatever thread the prediction is made."""


class Span(NamedTuple):
    """Starts over the scenarios, in seconds from now. Not calibrated: nobody new comes in them."""

    low_s: float
    middle_s: float
    high_s: float


def num_facts(snapshot: Snapshot) -> int:
    """What a copy of the planner is made of."""
    return len(snapshot.nodes) + len(snapshot.holdings) + len(snapshot.candidates)


def predict(
    snapshot: Snapshot, policy: Policy, now: float, wanted: Collection[str], expect: Expect
) -> dict[str, Span]:
    """For each of the wanted that starts in every scenario. None of them where that is too much work.

    The deeper in the queue the wanted are, the fewer scenarios are played: there, what one job does more and
    another less matters less.
    """
    copying = num_facts(snapshot) // FACTS_A_START
    most = MOST_WORK - copying
    if most <= 0:
        return {}
    lengths = _Lengths(expect, now)
    futures: list[Future] = []
    planned = NUM_SCENARIOS
    while len(futures) < planned:
        run_time = lengths.in_scenario(len(futures))
        futures.append(look_ahead(snapshot, policy, now, wanted, run_time, most))
        if len(futures) == 1:
            each = copying + futures[0].num_starts
            planned = min(max(MOST_WORK // max(each, 1), 1), NUM_SCENARIOS)
    return {
        attempt_id: _span([future.starts[attempt_id] - now for future in futures])
        for attempt_id in wanted
        if all(attempt_id in future.starts for future in futures)
    }


class _Lengths:
    """How long everybody runs in each scenario."""

    def __init__(self, expect: Expect, now: float) -> None:
        self._expect = expect
        self._now = now
        self._drawn: dict[str, tuple[float, ...]] = {}

    def in_scenario(self, number: int) -> RunTime:
        def run_time(work: Candidate | Holding) -> float:
            if work.attempt_id not in self._drawn:
                self._drawn[work.attempt_id] = _run_times(work, self._expect(work), self._now)
            return self._drawn[work.attempt_id][number]

        return run_time


def _run_times(work: Candidate | Holding, spread: Spread, now: float) -> tuple[float, ...]:
    """Of each scenario: all the quantiles, in an order that the owner's jobs share."""
    if work.is_endless:
        return (inf,) * NUM_SCENARIOS
    elapsed_s = max(now - work.placed_at, 0.0) if isinstance(work, Holding) else 0.0
    lengths = spread.quantiles(LEVELS, elapsed_s=elapsed_s)
    first, step = divmod(crc32((work.owner or work.attempt_id).encode()), NUM_SCENARIOS - 1)
    return tuple(lengths[(first + (step + 1) * number) % NUM_SCENARIOS] for number in range(NUM_SCENARIOS))


def _span(waits: Sequence[float]) -> Span:
    ordered = sorted(waits)
    return Span(ordered[0], ordered[len(ordered) // 2], ordered[-1])
