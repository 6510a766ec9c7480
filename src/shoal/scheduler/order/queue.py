"""Waiting candidates, in shape groups that need the same and queue lanes of one queue, project and priority.

If the first candidate of a group cannot start now, none in it can. So a cycle asks one question per group,
however long the group is.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf
from typing import NamedTuple

from shoal.scheduler.facts.amounts import Demand, demand_of
from shoal.scheduler.facts.snapshot import Candidate
from shoal.scheduler.placement.packing import ShapeCounts, needed_shape

MIN_MOMENTS = 64
"""Stale due times that may be kept, in addition to as many as there are candidates."""
SortKey = tuple[float, int, int, str]
"""What it is ordered by, then its arrival, its job's number and the attempt's id."""
QueuePosition = tuple[bool, SortKey]
"""Whether it is not due, then its key among those that are alike in that."""


class ShapeKey(NamedTuple):
    """All that decides whether a candidate can start, except its place in the queue."""

    demand: Demand
    limit_s: float
    array_id: str | None
    at_once: int | None


class _Order:
    """Candidates by score, and the due ones by arrival."""

    __slots__ = ("by_score", "due")

    def __init__(self) -> None:
        self.by_score: list[SortKey] = []
        self.due: list[SortKey] = []

    def first_position(self) -> QueuePosition | None:
        """Return the position of the candidate that starts first."""
        if self.due:
            return False, self.due[0]
        return (True, self.by_score[0]) if self.by_score else None


class ShapeGroup(_Order):
    """Candidates with one key."""

    __slots__ = ("key", "lane")

    def __init__(self, key: ShapeKey, lane: QueueLane) -> None:
        super().__init__()
        self.key = key
        self.lane = lane


class LaneKey(NamedTuple):
    priority: int
    project: str
    queue: str

    @classmethod
    def of(cls, candidate: Candidate) -> LaneKey:
        return cls(candidate.priority, candidate.project, candidate.queue)


class QueueLane(_Order):
    """The shape groups of one queue, project and priority, and all candidates in them."""

    __slots__ = ("groups", "key")

    def __init__(self, key: LaneKey) -> None:
        super().__init__()
        self.key = key
        self.groups: dict[ShapeKey, ShapeGroup] = {}

    def first(self, passed: set[ShapeGroup]) -> QueuePosition | None:
        """Return the first position in groups other than the passed ones."""
        if not passed:
            return self.first_position()
        positions = (group.first_position() for group in self.groups.values() if group not in passed)
        return min((position for position in positions if position is not None), default=None)


class CandidateQueue:
    """All candidates that may start as soon as there are resources."""

    def __init__(self, shape_counts: ShapeCounts) -> None:
        """`shape_counts` counts what they ask for."""
        self._shape_counts = shape_counts
        self.lanes: dict[LaneKey, QueueLane] = {}
        self.candidates: dict[str, Candidate] = {}
        self._groups: dict[str, ShapeGroup] = {}
        self._due: set[str] = set()
        self._moments: list[tuple[float, str]] = []
        """When the others are due. Entries of candidates that left stay until they are popped."""
        self._now = -inf

    def __len__(self) -> int:
        return len(self.candidates)

    def group_of(self, attempt_id: str) -> ShapeGroup:
        return self._groups[attempt_id]

    def position_of(self, candidate: Candidate) -> QueuePosition:
        if candidate.attempt_id in self._due:
            return False, key_by_age(candidate)
        return True, key_by_score(candidate)

    def nth(self, lane: QueueLane, index: int) -> QueuePosition | None:
        """Return the position `index` places behind the lane's first; None if the lane is shorter."""
        if index < len(lane.due):
            return False, lane.due[index]
        others = (sort_key for sort_key in lane.by_score if sort_key[-1] not in self._due)
        sort_key_at = next(islice(others, index - len(lane.due), None), None)
        return None if sort_key_at is None else (True, sort_key_at)

    def next_due(self) -> float:
        """Return when the next candidate becomes due; infinity if none does."""
        moments = self._moments
        while moments:
            if self._waits_for(*moments[0]):
                return moments[0][0]
            heappop(moments)
        return inf

    def advance_to(self, now: float) -> None:
        """Mark the candidates that are due at `now`. If the clock was set back, unmark those that are not."""
        if now < self._now:
            for attempt_id in [due_id for due_id in self._due if _due_at(self.candidates[due_id]) > now]:
                self._set_due(attempt_id, is_due=False)
                heappush(self._moments, (_due_at(self.candidates[attempt_id]), attempt_id))
        self._now = now
        while self.next_due() <= now:
            self._set_due(heappop(self._moments)[1], is_due=True)

    def add(self, candidate: Candidate) -> ShapeGroup:
        lane_key = LaneKey.of(candidate)
        lane = self.lanes.get(lane_key)
        if lane is None:
            lane = self.lanes[lane_key] = QueueLane(lane_key)
        key = shape_key(candidate)
        group = lane.groups.get(key)
        if group is None:
            group = lane.groups[key] = ShapeGroup(key, lane)
        sort_key = key_by_score(candidate)
        insort(group.by_score, sort_key)
        insort(lane.by_score, sort_key)
        self.candidates[candidate.attempt_id] = candidate
        self._groups[candidate.attempt_id] = group
        self._count(key.demand, 1)
        due_at = _due_at(candidate)
        if due_at <= self._now:
            self._set_due(candidate.attempt_id, is_due=True)
        else:
            heappush(self._moments, (due_at, candidate.attempt_id))
            if len(self._moments) > 2 * len(self.candidates) + MIN_MOMENTS:
                self._moments = [moment for moment in set(self._moments) if self._waits_for(*moment)]
                heapify(self._moments)
        return group

    def remove(self, attempt_id: str) -> Candidate:
        if attempt_id in self._due:
            self._set_due(attempt_id, is_due=False)
        candidate, group = self.candidates.pop(attempt_id), self._groups.pop(attempt_id)
        self._count(group.key.demand, -1)
        lane, sort_key = group.lane, key_by_score(candidate)
        del group.by_score[bisect_left(group.by_score, sort_key)]
        del lane.by_score[bisect_left(lane.by_score, sort_key)]
        if not group.by_score:
            del lane.groups[group.key]
            if not lane.groups:
                del self.lanes[lane.key]
        return candidate

    def _count(self, demand: Demand, sign: int) -> None:
        if demand.need.num_gpus:
            self._shape_counts.count(needed_shape(demand.need), sign * demand.min_nodes)

    def _waits_for(self, moment: float, attempt_id: str) -> bool:
        candidate = self.candidates.get(attempt_id)
        return candidate is not None and attempt_id not in self._due and _due_at(candidate) == moment

    def _set_due(self, attempt_id: str, *, is_due: bool) -> None:
        group, sort_key = self._groups[attempt_id], key_by_age(self.candidates[attempt_id])
        for order in (group, group.lane):
            if is_due:
                insort(order.due, sort_key)
            else:
                del order.due[bisect_left(order.due, sort_key)]
        (self._due.add if is_due else self._due.remove)(attempt_id)


def shape_key(candidate: Candidate) -> ShapeKey:
    request, at_once = candidate.request, candidate.array_at_once
    limit_s = inf if request.longest_s is None else request.longest_s
    array_id = None if at_once is None else candidate.array_id
    demand = demand_of(request, candidate.excluded_nodes, candidate.avoided_nodes)
    return ShapeKey(demand, limit_s, array_id, at_once)


def key_by_age(candidate: Candidate) -> SortKey:
    return candidate.submitted_at, candidate.order, candidate.number, candidate.attempt_id


def key_by_score(candidate: Candidate) -> SortKey:
    score = inf if candidate.score is None else candidate.score
    return score, candidate.order, candidate.number, candidate.attempt_id


def _due_at(candidate: Candidate) -> float:
    return -inf if candidate.due_at is None else candidate.due_at
