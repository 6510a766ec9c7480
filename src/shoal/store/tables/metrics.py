"""Curves of numbers, by job, each in a bounded number of points, however long it grows.

A row is one stretch of a curve. New points touch the rows at its end. Once there are too many rows, the
stretches double in length and the whole curve is rewritten.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from sqlalchemy import and_, bindparam, delete, func, insert, select, tuple_, update

from shoal.curve import Axis, Point, Samples, fold_points, widen_stretches
from shoal.store.schema import metric_points as points
from shoal.store.schema import metric_series as series
from shoal.store.session import Session

MAX_SERIES = 1000
"""Series per job."""
MAX_POINTS = 512
"""Points per series."""
NO_RANK = -1
CHANGING = ("epoch", "rank", "stride", "num_points", "heard_at", "newest_x", "newest")

_THIS: dict[str, Any] = {name: bindparam(f"of_{name}") for name in ("job_id", "name", "node", "axis")}
IS_SERIES = and_(*(series.c[name] == value for name, value in _THIS.items()))
IS_POINT = and_(*(points.c[name] == value for name, value in _THIS.items()))
HEAD = select(series.c.epoch, series.c.rank, series.c.stride, series.c.num_points).where(IS_SERIES)
COUNT = select(func.count()).select_from(series).where(series.c.job_id == bindparam("of"))
ADD = insert(series)
CHANGE = update(series).where(IS_SERIES).values({name: bindparam(f"to_{name}") for name in CHANGING})
COLUMNS = (points.c.x, points.c.last, points.c.low, points.c.high)
FROM = select(points.c.stretch, *COLUMNS).where(IS_POINT, points.c.stretch >= bindparam("first"))
PUT = insert(points)
DROP_FROM = delete(points).where(IS_POINT, points.c.stretch >= bindparam("first"))
DROP_ONE = delete(points).where(IS_POINT, points.c.stretch == bindparam("at"))
ALL_SERIES = (
    select(*(series.c[name] for name in ("name", "node", "axis", "rank", "heard_at", "newest_x", "newest")))
    .where(series.c.job_id == bindparam("of"))
    .order_by(series.c.name, series.c.node, series.c.axis)
)
ALL_POINTS = select(*COLUMNS).where(IS_POINT).order_by(points.c.stretch)
SILENT = (
    select(series.c.job_id)
    .group_by(series.c.job_id)
    .having(func.max(series.c.heard_at) < bindparam("before"))
    .order_by(series.c.job_id)
    .limit(bindparam("most"))
)
ROWS = func.sum(series.c.num_points + 1)
ALL_ROWS = select(func.coalesce(ROWS, 0)).select_from(series)
OLDEST = (
    select(series.c.job_id, ROWS)
    .group_by(series.c.job_id)
    .order_by(func.max(series.c.heard_at), series.c.job_id)
    .limit(bindparam("most"))
    .offset(bindparam("skip"))
)
DROP_SERIES_OF_JOB = delete(series).where(series.c.job_id == bindparam("of"))
_POINT_KEY = (points.c.job_id, points.c.name, points.c.node, points.c.axis, points.c.stretch)
_POINTS_OF_JOB = select(*_POINT_KEY).where(points.c.job_id == bindparam("of")).limit(bindparam("most"))
DROP_POINTS_OF_JOB = delete(points).where(tuple_(*_POINT_KEY).in_(_POINTS_OF_JOB))


class MetricSeries(msgspec.Struct, frozen=True, kw_only=True):
    """One curve. `node` is empty for what ranks logged. `rank` is None for what nodes measured."""

    name: str
    node: str
    axis: Axis
    rank: int | None
    heard_at: float
    newest: tuple[int, float | None] | None
    """The `x` and the value reported last. None: only the points are known."""


class MetricTable:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._run = session.run

    def add(self, job_id: str, epoch: int, node: str, samples: Iterable[Samples], now: float) -> int:
        """Keep the samples that a node of this attempt reported. Return how many points were dropped.

        May be repeated. If several ranks log one name in an attempt, the points of the lowest rank stay.
        """
        lost = 0
        for curve in samples:
            key = {
                "job_id": job_id,
                "name": curve.name,
                "node": "" if curve.rank is not None else node,
                "axis": curve.axis,
            }
            if curve.points and not self._add(key, epoch, curve, now):
                lost += len(curve.points)
        return lost

    def series(self, job_id: str) -> list[MetricSeries]:
        return [
            MetricSeries(
                name=name,
                node=node,
                axis=Axis(axis),
                rank=None if rank == NO_RANK else rank,
                heard_at=at,
                newest=None if x is None else (x, value),
            )
            for name, node, axis, rank, at, x, value in self._run(ALL_SERIES, {"of": job_id})
        ]

    def points(self, job_id: str, curve: MetricSeries) -> list[Point]:
        """In the order of `x`."""
        this = _of({"job_id": job_id, "name": curve.name, "node": curve.node, "axis": curve.axis})
        return [Point(*row) for row in self._run(ALL_POINTS, this)]

    def silent(self, before: float, most: int) -> list[str]:
        """At most `most` jobs without a report since then."""
        return [job_id for (job_id,) in self._run(SILENT, {"before": before, "most": most})]

    def num_rows(self) -> int:
        """Rows of all jobs together: curves and their points. Reads only the heads of curves."""
        return int(self._session.value(ALL_ROWS, {}))

    def oldest(self, skip: int, most: int) -> list[tuple[str, int]]:
        """Jobs and their numbers of rows, longest without a report first, after the first `skip`."""
        return [(job_id, int(count)) for job_id, count in self._run(OLDEST, {"skip": skip, "most": most})]

    def drop(self, job_id: str, most: int) -> bool:
        """Remove at most `most` points of the job, and with the last points its curves. False: points are
        left.
        """
        if self._run(DROP_POINTS_OF_JOB, {"of": job_id, "most": most}).rowcount == most:
            return False
        self._run(DROP_SERIES_OF_JOB, {"of": job_id})
        return True

    def _add(self, key: dict[str, Any], epoch: int, samples: Samples, now: float) -> bool:
        rank = NO_RANK if samples.rank is None else samples.rank
        head = self._run(HEAD, _of(key)).fetchone()
        if head is None:
            if self._session.value(COUNT, {"of": key["job_id"]}) >= MAX_SERIES:
                return False
            head = (epoch, rank, 1, 0)
            begun = dict(zip(CHANGING, (*head, now, None, None), strict=True))
            self._run(ADD, {**key, **begun})
        if (epoch, -rank) < (head[0], -head[1]):
            return True  # another rank's values count, so nothing useful is lost
        stride, num_points = self._merge(key, samples.points, stride=head[2], num_points=head[3])
        newest = samples.newest or max(samples.points, key=lambda point: point.x)
        values = (epoch, rank, stride, num_points, now, newest.x, newest.last)
        changed = {f"to_{name}": value for name, value in zip(CHANGING, values, strict=True)}
        self._run(CHANGE, {**_of(key), **changed})
        return True

    def _merge(
        self, key: dict[str, Any], new: tuple[Point, ...], *, stride: int, num_points: int
    ) -> tuple[int, int]:
        """Merge the points into the stretches. Return the length of the stretches and their number
        afterwards.
        """
        first = min(point.x for point in new) // stride
        held = self._from(key, first)
        stretches = fold_points(new, stride, dict(held))
        total = num_points - len(held) + len(stretches)
        if total <= MAX_POINTS:
            changed = {at: point for at, point in stretches.items() if held.get(at) != point}
            if gone := [{**_of(key), "at": at} for at in changed if at in held]:
                self._session.run_many(DROP_ONE, gone)
            self._put(key, changed)
            return stride, total
        # The curve is half full afterwards, so the next doubling is as far away as the curve is long.
        everything, stride = widen_stretches({**self._from(key, 0), **stretches}, stride, MAX_POINTS // 2)
        self._run(DROP_FROM, {**_of(key), "first": 0})
        self._put(key, everything)
        return stride, len(everything)

    def _from(self, key: dict[str, Any], first: int) -> dict[int, Point]:
        rows = self._run(FROM, {**_of(key), "first": first})
        return {row[0]: Point(*row[1:]) for row in rows}

    def _put(self, key: dict[str, Any], stretches: dict[int, Point]) -> None:
        rows = [
            {**key, "stretch": at, "x": point.x, "last": point.last, "low": point.low, "high": point.high}
            for at, point in stretches.items()
        ]
        if rows:
            self._session.run_many(PUT, rows)


def _of(key: dict[str, Any]) -> dict[str, Any]:
    return {f"of_{name}": value for name, value in key.items()}
