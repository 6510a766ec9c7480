"""Those who wait, in rows that ask alike and lines of one queue, project and priority.

If the first of a row cannot start now, nobody in it can: a cycle costs as many questions as there are
rows, however long they are.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from math import inf
from typing import NamedTuple

from shoal.scheduler.amounts import Demand, demand_of
from shoal.scheduler.snapshot import Candidate
from shoal.scheduler.typical import Typical, shape_asked

Place = tuple[float, int, str]
"""What it is ordered by, then who came first, then the attempt's id."""


class RowKey(NamedTuple):
    """All that decides whether a candidate can start, but for its place."""

    demand: Demand
    limit_s: float
    array_id: str | None
    at_once: int | None


class Row:
    """Candidates with one key, in both orders."""

    __slots__ = ("by_due", "by_length", "key", "line")

    def __init__(self, key: RowKey, line: Line) -> None:
        self.key = key
        self.line = line
        self.by_due: list[Place] = []
        self.by_length: list[Place] = []


class LineKey(NamedTuple):
    priority: int
    project: str
    queue: str

    @classmethod
    def of(cls, candidate: Candidate) -> LineKey:
        return cls(candidate.priority, candidate.project, candidate.queue)


class Line:
    """The rows of one queue, project and priority. `by_due` is everybody in them."""

    __slots__ = ("by_due", "key", "rows")

    def __init__(self, key: LineKey) -> None:
        self.key = key
        self.rows: dict[RowKey, Row] = {}
        self.by_due: list[Place] = []

    def first(self, passed: set[Row]) -> Place | None:
        """Who is due first of those in rows that were not passed over."""
        if not passed:
            return self.by_due[0] if self.by_due else None
        return min((row.by_due[0] for row in self.rows.values() if row not in passed), default=None)


class Rows:
    """Everybody who may start as soon as there is room."""

    def __init__(self, typical: Typical) -> None:
        """`typical` counts what they ask for."""
        self._typical = typical
        self.lines: dict[LineKey, Line] = {}
        self.candidates: dict[str, Candidate] = {}
        self._rows: dict[str, Row] = {}

    def __len__(self) -> int:
        return len(self.candidates)

    def row_of(self, attempt_id: str) -> Row:
        return self._rows[attempt_id]

    def add(self, candidate: Candidate) -> Row:
        line_key = LineKey.of(candidate)
        line = self.lines.get(line_key)
        if line is None:
            line = self.lines[line_key] = Line(line_key)
        key = row_key(candidate)
        row = line.rows.get(key)
        if row is None:
            row = line.rows[key] = Row(key, line)
        due = place_by_due(candidate)
        insort(row.by_due, due)
        insort(line.by_due, due)
        insort(row.by_length, place_by_length(candidate))
        self.candidates[candidate.attempt_id] = candidate
        self._rows[candidate.attempt_id] = row
        self._typical.count(shape_asked(key.demand.need), key.demand.min_nodes)
        return row

    def remove(self, attempt_id: str) -> Candidate:
        candidate, row = self.candidates.pop(attempt_id), self._rows.pop(attempt_id)
        line, due = row.line, place_by_due(candidate)
        self._typical.count(shape_asked(row.key.demand.need), -row.key.demand.min_nodes)
        del row.by_due[bisect_left(row.by_due, due)]
        del line.by_due[bisect_left(line.by_due, due)]
        del row.by_length[bisect_left(row.by_length, place_by_length(candidate))]
        if not row.by_due:
            del line.rows[row.key]
            if not line.rows:
                del self.lines[line.key]
        return candidate


def row_key(candidate: Candidate) -> RowKey:
    request, at_once = candidate.request, candidate.array_at_once
    limit_s = inf if request.time_limit_s is None else request.time_limit_s
    array_id = None if at_once is None else candidate.array_id
    return RowKey(demand_of(request, candidate.excluded_nodes), limit_s, array_id, at_once)


def place_by_due(candidate: Candidate) -> Place:
    due = candidate.submitted_at if candidate.due_at is None else candidate.due_at
    return due, candidate.order, candidate.attempt_id


def place_by_length(candidate: Candidate) -> Place:
    limit_s = candidate.request.time_limit_s
    longest = inf if limit_s is None else limit_s
    return (
        longest if candidate.expected_s is None else candidate.expected_s,
        candidate.order,
        candidate.attempt_id,
    )
