"""Those who wait, in rows that ask alike and lines of one queue, project and priority.

If the first of a row cannot start now, nobody in it can: a cycle costs as many questions as there are
rows, however long they are.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf
from typing import NamedTuple

from shoal.scheduler.amounts import Demand, demand_of
from shoal.scheduler.snapshot import Candidate
from shoal.scheduler.typical import Typical, shape_asked

SOME = 64
"""Moments of those who have gone that are kept at least, besides as many as there are candidates."""
Place = tuple[float, int, int, str]
"""What it is ordered by, then who came first, then the job's number, then the attempt's id."""
Turn = tuple[bool, Place]
"""Whether it is not due yet, then its place among those who are alike in that."""


class RowKey(NamedTuple):
    """All that decides whether a candidate can start, but for its place."""

    demand: Demand
    limit_s: float
    array_id: str | None
    at_once: int | None


class _Order:
    """Candidates by score, and those who are due by arrival."""

    __slots__ = ("by_score", "due")

    def __init__(self) -> None:
        self.by_score: list[Place] = []
        self.due: list[Place] = []

    def turn(self) -> Turn | None:
        """Of whoever is the first to start."""
        if self.due:
            return False, self.due[0]
        return (True, self.by_score[0]) if self.by_score else None


class Row(_Order):
    """Candidates with one key."""

    __slots__ = ("key", "line")

    def __init__(self, key: RowKey, line: Line) -> None:
        super().__init__()
        self.key = key
        self.line = line


class LineKey(NamedTuple):
    priority: int
    project: str
    queue: str

    @classmethod
    def of(cls, candidate: Candidate) -> LineKey:
        return cls(candidate.priority, candidate.project, candidate.queue)


class Line(_Order):
    """The rows of one queue, project and priority, and everybody in them."""

    __slots__ = ("key", "rows")

    def __init__(self, key: LineKey) -> None:
        super().__init__()
        self.key = key
        self.rows: dict[RowKey, Row] = {}

    def first(self, passed: set[Row]) -> Turn | None:
        """Of those in rows that were not passed over."""
        if not passed:
            return self.turn()
        turns = (row.turn() for row in self.rows.values() if row not in passed)
        return min((turn for turn in turns if turn is not None), default=None)


class Rows:
    """Everybody who may start as soon as there is room."""

    def __init__(self, typical: Typical) -> None:
        """`typical` counts what they ask for."""
        self._typical = typical
        self.lines: dict[LineKey, Line] = {}
        self.candidates: dict[str, Candidate] = {}
        self._rows: dict[str, Row] = {}
        self._due: set[str] = set()
        self._moments: list[tuple[float, str]] = []
        """When the others are due; some may have gone since."""
        self._now = -inf

    def __len__(self) -> int:
        return len(self.candidates)

    def row_of(self, attempt_id: str) -> Row:
        return self._rows[attempt_id]

    def turn_of(self, candidate: Candidate) -> Turn:
        if candidate.attempt_id in self._due:
            return False, place_by_age(candidate)
        return True, place_by_score(candidate)

    def nth(self, line: Line, place: int) -> Turn | None:
        """Of the one so many places behind the line's first; None when it is not that long."""
        if place < len(line.due):
            return False, line.due[place]
        others = (one for one in line.by_score if one[-1] not in self._due)
        found = next(islice(others, place - len(line.due), None), None)
        return None if found is None else (True, found)

    def next_due(self) -> float:
        """When somebody is due who is not yet; infinity if nobody is."""
        moments = self._moments
        while moments:
            if self._waits_for(*moments[0]):
                return moments[0][0]
            heappop(moments)
        return inf

    def come_to(self, now: float) -> None:
        """Let those be due whose moment has come; a clock that was set back takes it away again."""
        if now < self._now:
            for attempt_id in [one for one in self._due if _due_at(self.candidates[one]) > now]:
                self._set_due(attempt_id, is_due=False)
                heappush(self._moments, (_due_at(self.candidates[attempt_id]), attempt_id))
        self._now = now
        while self.next_due() <= now:
            self._set_due(heappop(self._moments)[1], is_due=True)

    def add(self, candidate: Candidate) -> Row:
        line_key = LineKey.of(candidate)
        line = self.lines.get(line_key)
        if line is None:
            line = self.lines[line_key] = Line(line_key)
        key = row_key(candidate)
        row = line.rows.get(key)
        if row is None:
            row = line.rows[key] = Row(key, line)
        place = place_by_score(candidate)
        insort(row.by_score, place)
        insort(line.by_score, place)
        self.candidates[candidate.attempt_id] = candidate
        self._rows[candidate.attempt_id] = row
        self._count(key.demand, 1)
        due_at = _due_at(candidate)
        if due_at <= self._now:
            self._set_due(candidate.attempt_id, is_due=True)
        else:
            heappush(self._moments, (due_at, candidate.attempt_id))
            if len(self._moments) > 2 * len(self.candidates) + SOME:
                self._moments = [one for one in set(self._moments) if self._waits_for(*one)]
                heapify(self._moments)
        return row

    def remove(self, attempt_id: str) -> Candidate:
        if attempt_id in self._due:
            self._set_due(attempt_id, is_due=False)
        candidate, row = self.candidates.pop(attempt_id), self._rows.pop(attempt_id)
        self._count(row.key.demand, -1)
        line, place = row.line, place_by_score(candidate)
        del row.by_score[bisect_left(row.by_score, place)]
        del line.by_score[bisect_left(line.by_score, place)]
        if not row.by_score:
            del line.rows[row.key]
            if not line.rows:
                del self.lines[line.key]
        return candidate

    def _count(self, demand: Demand, sign: int) -> None:
        if demand.need.num_gpus:
            self._typical.count(shape_asked(demand.need), sign * demand.min_nodes)

    def _waits_for(self, moment: float, attempt_id: str) -> bool:
        candidate = self.candidates.get(attempt_id)
        return candidate is not None and attempt_id not in self._due and _due_at(candidate) == moment

    def _set_due(self, attempt_id: str, *, is_due: bool) -> None:
        row, place = self._rows[attempt_id], place_by_age(self.candidates[attempt_id])
        for order in (row, row.line):
            if is_due:
                insort(order.due, place)
            else:
                del order.due[bisect_left(order.due, place)]
        (self._due.add if is_due else self._due.remove)(attempt_id)


def row_key(candidate: Candidate) -> RowKey:
    request, at_once = candidate.request, candidate.array_at_once
    limit_s = inf if request.longest_s is None else request.longest_s
    array_id = None if at_once is None else candidate.array_id
    demand = demand_of(request, candidate.excluded_nodes, candidate.avoided_nodes)
    return RowKey(demand, limit_s, array_id, at_once)


def place_by_age(candidate: Candidate) -> Place:
    return candidate.submitted_at, candidate.order, candidate.number, candidate.attempt_id


def place_by_score(candidate: Candidate) -> Place:
    score = inf if candidate.score is None else candidate.score
    return score, candidate.order, candidate.number, candidate.attempt_id


def _due_at(candidate: Candidate) -> float:
    return -inf if candidate.due_at is None else candidate.due_at
