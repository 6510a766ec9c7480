"""The cluster from now on, as the planner itself would run it, if everybody ran for as long as is supposed.

Nobody new comes and no node fails here: what that changes is for whoever reads the result to allow for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

from shoal.scheduler.planner import Planner
from shoal.scheduler.policy import Policy
from shoal.scheduler.snapshot import Candidate, Holding, Snapshot

SLACK = 0.03
"""Ends that follow each other within this share of the time since now are planned for at once: the longer the
wait, the less a moment matters, and the plans that a simulation takes grow with its logarithm."""
LEAST_SLACK_S = 1.0

RunTime = Callable[[Candidate | Holding], float]
"""How long it runs in all; of one that holds resources, never less than it already has."""


class Future(NamedTuple):
    starts: dict[str, float]
    """When each of those asked about starts, as far as was looked."""
    num_starts: int
    """Of anybody: what it cost to look."""


def look_ahead(
    snapshot: Snapshot,
    policy: Policy,
    now: float,
    wanted: Collection[str],
    run_time: RunTime,
    max_starts: int,
) -> Future:
    """Until all of the wanted have started, nobody can any more, or so many others have."""
    planner = Planner.of(snapshot, policy)
    waiting = {one.attempt_id: one for one in snapshot.candidates}
    ends = [(max(held.placed_at + run_time(held), now), held.attempt_id) for held in snapshot.holdings]
    heapify(ends)
    missing, found = {one for one in wanted if one in waiting}, dict[str, float]()
    at, num_starts = now, 0
    while missing and num_starts < max_starts:
        made = planner.plan(at)
        num_starts += len(made.starts)
        for start in made.starts:
            heappush(ends, (at + run_time(waiting[start.attempt_id]), start.attempt_id))
            if start.attempt_id in missing:
                missing.discard(start.attempt_id)
                found[start.attempt_id] = at
        for eviction in made.evictions:
            heappush(ends, (at, eviction.attempt_id))  # gone at once; where it goes on is left out
        again_at = made.look_again_at
        again_at = inf if again_at is None or again_at <= at else again_at
        following = min(ends[0][0] if ends else inf, again_at)
        if following == inf:
            break
        at = _end_together(planner, ends, following, now)
    return Future(found, num_starts)


def _end_together(planner: Planner, ends: list[tuple[float, str]], following: float, now: float) -> float:
    """Let all end that do at about the same time, and return the time of the last."""
    at, until = following, following + max(SLACK * (following - now), LEAST_SLACK_S)
    while ends and ends[0][0] <= until:
        at, attempt_id = heappop(ends)
        planner.release(attempt_id, at)
    return max(at, following)
