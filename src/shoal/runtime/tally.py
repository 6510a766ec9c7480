"""What was measured on a node and not told yet: bounded, whatever the ranks send.

Knows no socket and no clock. What is too much or makes no sense is dropped, and counted as one
more metric.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from shoal.curve import MAX_X, finite, single, thinned
from shoal.runtime.metrics import MAX_VALUES, Line, is_metric_name
from shoal.samples import Axis, Point, Samples

MAX_SERIES = 200
MAX_WAITING = 128
"""Points of one series before neighbours are merged."""
MAX_TOLD = 2000
"""Points in one message."""
LOST = "points_lost"

Key = tuple[str, Axis, bool]
"""A name, what it runs along, and whether it is of the node."""


class Tally:
    def __init__(self, ranks: range) -> None:
        self._ranks = ranks
        self._points: dict[Key, list[Point]] = {}
        self._newest: dict[Key, Point] = {}
        """What ranks said last: of a step that is made again it is not the one with the highest `x`."""
        self._owners: dict[str, int] = {}
        self._lost = self._lost_told = 0
        self.has_lines = False
        """Whether any rank said anything since the last `take`."""
        self.steps_heard = 0
        """Calls that named the step they are of."""

    def hear(self, line: Line) -> None:
        """One call of a rank's. Of ranks that use one name, the lowest one's values are kept."""
        self._lost = min(self._lost + max(0, line.lost), MAX_X)
        x = line.at_ms if line.step is None else line.step
        if line.rank not in self._ranks or len(line.values) > MAX_VALUES or not 0 <= x <= MAX_X:
            self._lost += 1
            return
        self.has_lines = True
        self.steps_heard += line.step is not None
        axis = Axis.TIME if line.step is None else Axis.STEP
        for name, value in line.values.items():
            self._hear_one(name, axis, line.rank, x, value)

    def miss(self) -> None:
        """Something came that nobody can read."""
        self._lost += 1

    def note(self, at_ms: int, values: dict[str, float]) -> None:
        """What the supervisor itself has measured of the node."""
        for name, value in values.items():
            self._add((name, Axis.TIME, True), [single(at_ms, value)])

    def take(self, at_ms: int) -> tuple[Samples, ...]:
        """Everything since the last time, and no more than fits a message."""
        if self._lost > self._lost_told:
            self._lost_told = self._lost
            self.note(at_ms, {LOST: self._lost})
        taken, self._points, self.has_lines = self._points, {}, False
        newest, self._newest = self._newest, {}
        most = max(1, MAX_TOLD // max(len(taken), 1))
        return tuple(
            self._samples(key, thinned(points, most), newest.get(key)) for key, points in taken.items()
        )

    def put_back(self, told: Iterable[Samples]) -> None:
        """Nobody heard this: have it told again, before what came since."""
        for one in told:
            if one.rank is None or one.rank == self._owners.get(one.name):
                key = (one.name, one.axis, one.rank is None)
                self._points[key] = list(chain(one.points, self._points.pop(key, ())))
                if one.rank is not None:
                    self._newest.setdefault(key, one.newest or one.points[-1])

    def _samples(self, key: Key, points: list[Point], newest: Point | None) -> Samples:
        name, axis, is_nodes = key
        is_last = newest is None or newest.x == points[-1].x
        return Samples(
            name=name,
            axis=axis,
            points=tuple(points),
            rank=None if is_nodes else self._owners[name],
            newest=None if is_last else newest,
        )

    def _hear_one(self, name: str, axis: Axis, rank: int, x: int, value: float | None) -> None:
        if not is_metric_name(name):
            self._lost += 1
            return
        owner = self._owners.get(name)
        if owner is not None and owner < rank:
            return
        if owner is None and len(self._owners) >= MAX_SERIES:
            self._lost += 1
            return
        if owner is not None and rank < owner:
            for other in Axis:
                self._points.pop((name, other, False), None)
        self._owners[name] = rank
        kept = None if value is None else finite(value)
        point = Point(x, kept, kept, kept)
        self._newest[name, axis, False] = point
        self._add((name, axis, False), [point])

    def _add(self, key: Key, points: list[Point]) -> None:
        waiting = self._points.setdefault(key, [])
        waiting += points
        if len(waiting) > MAX_WAITING:
            self._points[key] = thinned(waiting, MAX_WAITING // 2)
