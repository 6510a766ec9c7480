"""When waiting jobs will start: a span over scenarios of how long every job runs.

Each scenario is a future that a copy of the planner plays (`look_ahead`). No new job arrives in it and no
node fails: the caller of `predict` allows for what that changes.

Each scenario gives every job another quantile of its expected run time. Over all scenarios a job has each
quantile once, and the owner's name decides in which scenario it has which. So the same facts give the same
span. The jobs of one owner are long or short together, as a batch of them is, and those of two owners are
not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple
from zlib import crc32

from shoal.scheduler.facts.policy import Policy
from shoal.scheduler.facts.snapshot import Candidate, Holding, Snapshot
from shoal.scheduler.planner import Planner
from shoal.scheduler.prediction.forecast import RunTimeSpread

SLACK = 0.03
"""Ends that follow each other within this share of the time since now are planned together. The longer the
wait, the less a moment matters, so the number of plans grows with the logarithm of the wait."""
LEAST_SLACK_S = 1.0

RunTime = Callable[[Candidate | Holding], float]
"""How long it runs in all. For one that holds resources, never less than it has already run."""


class PlannedFuture(NamedTuple):
    starts: dict[str, float]
    """When each of the wanted attempts starts, up to the end of the simulated time."""
    num_starts: int
    """Starts of any attempt: the cost of the simulation."""


def look_ahead(
    snapshot: Snapshot,
    policy: Policy,
    now: float,
    wanted: Collection[str],
    run_time: RunTime,
    max_starts: int,
) -> PlannedFuture:
    """Play the future until all wanted attempts have started, none can start any more, or `max_starts` have
    started.
    """
    planner = Planner.of(snapshot, policy)
    waiting = {attempt_id.attempt_id: attempt_id for attempt_id in snapshot.candidates}
    ends = [
        (max(holding.placed_at + run_time(holding), now), holding.attempt_id) for holding in snapshot.holdings
    ]
    heapify(ends)
    missing, starts = {attempt_id for attempt_id in wanted if attempt_id in waiting}, dict[str, float]()
    at, num_starts = now, 0
    while missing and num_starts < max_starts:
        result = planner.plan(at)
        num_starts += len(result.starts)
        for start in result.starts:
            heappush(ends, (at + run_time(waiting[start.attempt_id]), start.attempt_id))
            if start.attempt_id in missing:
                missing.discard(start.attempt_id)
                starts[start.attempt_id] = at
        for eviction in result.evictions:
            heappush(ends, (at, eviction.attempt_id))  # stops at once; its next attempt is left out
        replan_at = result.replan_at
        replan_at = inf if replan_at is None or replan_at <= at else replan_at
        following = min(ends[0][0] if ends else inf, replan_at)
        if following == inf:
            break
        at = _end_together(planner, ends, following, now)
    return PlannedFuture(starts, num_starts)


def _end_together(planner: Planner, ends: list[tuple[float, str]], following: float, now: float) -> float:
    """End all attempts that end at about the same time, and return the time of the last."""
    at, until = following, following + max(SLACK * (following - now), LEAST_SLACK_S)
    while ends and ends[0][0] <= until:
        at, attempt_id = heappop(ends)
        planner.release(attempt_id, at)
    return max(at, following)


NUM_SCENARIOS = 11
"""A prime, so steps of any length through the quantiles meet all of them."""
LEVELS = tuple((level + 0.5) / NUM_SCENARIOS for level in range(NUM_SCENARIOS))
MOST_WORK = 3000
"""Starts that may be planned for one prediction, in all scenarios together: about a quarter of a second."""
FACTS_PER_START = 6
"""How many nodes, holdings and candidates are copied in the time that planning one start takes."""


ExpectRunTime = Callable[[Candidate | Holding], RunTimeSpread]
"""How long a run may take. Called once per job, in the thread that makes the prediction."""


class StartSpan(NamedTuple):
    """Starts over the scenarios, in seconds from now. Not calibrated: no new job arrives in them."""

    low_s: float
    middle_s: float
    high_s: float


def num_facts(snapshot: Snapshot) -> int:
    """The number of facts that a copy of the planner is made from."""
    return len(snapshot.nodes) + len(snapshot.holdings) + len(snapshot.candidates)


def predict(
    snapshot: Snapshot, policy: Policy, now: float, wanted: Collection[str], expect: ExpectRunTime
) -> dict[str, StartSpan]:
    """Return the span of each wanted attempt that starts in every scenario. Empty if that is too much work.

    The deeper in the queue the wanted attempts are, the fewer scenarios are played: there, the run times of
    single jobs matter less.
    """
    copying = num_facts(snapshot) // FACTS_PER_START
    most = MOST_WORK - copying
    if most <= 0:
        return {}
    lengths = _ScenarioRunTimes(expect, now)
    futures: list[PlannedFuture] = []
    planned = NUM_SCENARIOS
    while len(futures) < planned:
        run_time = lengths.in_scenario(len(futures))
        futures.append(look_ahead(snapshot, policy, now, wanted, run_time, most))
        if len(futures) == 1:
            cost_of_one = copying + futures[0].num_starts
            planned = min(max(MOST_WORK // max(cost_of_one, 1), 1), NUM_SCENARIOS)
    return {
        attempt_id: _span([future.starts[attempt_id] - now for future in futures])
        for attempt_id in wanted
        if all(attempt_id in future.starts for future in futures)
    }


class _ScenarioRunTimes:
    """How long every job runs in each scenario."""

    def __init__(self, expect: ExpectRunTime, now: float) -> None:
        self._expect = expect
        self._now = now
        self._drawn: dict[str, tuple[float, ...]] = {}

    def in_scenario(self, number: int) -> RunTime:
        def run_time(work: Candidate | Holding) -> float:
            if work.attempt_id not in self._drawn:
                self._drawn[work.attempt_id] = _run_times(work, self._expect(work), self._now)
            return self._drawn[work.attempt_id][number]

        return run_time


def _run_times(work: Candidate | Holding, spread: RunTimeSpread, now: float) -> tuple[float, ...]:
    """Return the run time in each scenario: all quantiles, in an order that the owner's jobs share."""
    if work.is_endless:
        return (inf,) * NUM_SCENARIOS
    elapsed_s = max(now - work.placed_at, 0.0) if isinstance(work, Holding) else 0.0
    lengths = spread.quantiles(LEVELS, elapsed_s=elapsed_s)
    first, step = divmod(crc32((work.owner or work.attempt_id).encode()), NUM_SCENARIOS - 1)
    return tuple(lengths[(first + (step + 1) * number) % NUM_SCENARIOS] for number in range(NUM_SCENARIOS))


def _span(waits: Sequence[float]) -> StartSpan:
    ordered = sorted(waits)
    return StartSpan(ordered[0], ordered[len(ordered) // 2], ordered[-1])
