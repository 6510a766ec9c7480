"""Points of metric curves, and how a curve of any length fits into a bounded number of points.

Supervisors measure the points and the store keeps them. This module imports nothing else of Shoal.

A curve is cut into stretches of equal length, a power of two. The length doubles when there are too many
stretches. A stretch keeps its last value, its least and its greatest, so peaks stay visible. If a step was
repeated, the later value counts: alone while a stretch is one step long, otherwise as the last value of its
stretch if the step is the last one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum

import msgspec


class Axis(StrEnum):
    """The x-axis of a curve."""

    STEP = "step"
    TIME = "time"
    """Milliseconds since 1970, by the clock of the measuring node."""


class Point(msgspec.Struct, frozen=True, array_like=True):
    """One value, or a stretch of neighbours with its last value (at `x`), least and greatest.

    None: not a finite number.
    """

    x: int
    last: float | None
    low: float | None
    high: float | None


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """The points of one metric that a node has measured since its last report."""

    name: str
    axis: Axis
    points: tuple[Point, ...]
    """In the order of `x`. If a step was repeated, only the later point."""
    rank: int | None = None
    """The rank that reported it. None: the node itself."""
    newest: Point | None = None
    """The newest report, if steps were repeated. None: the last of `points`."""


MAX_X = (1 << 53) - 1
"""The greatest integer that every JSON reader represents exactly."""


def finite(value: float) -> float | None:
    """Return the value, or None if it is not a finite number."""
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def single_point(x: int, value: float) -> Point:
    kept = finite(value)
    return Point(x, kept, kept, kept)


def merge_points(older: Point, newer: Point) -> Point:
    """Merge two points of one stretch. If both have the same `x`, the newer one gives the value."""
    last = newer if newer.x >= older.x else older
    lows = [low for low in (older.low, newer.low) if low is not None]
    highs = [high for high in (older.high, newer.high) if high is not None]
    return Point(last.x, last.last, min(lows, default=None), max(highs, default=None))


def fold_points(
    points: Iterable[Point], stride: int, into: dict[int, Point] | None = None
) -> dict[int, Point]:
    """Merge the points into stretches, in order of arrival. `into` is changed and returned."""
    stretches = {} if into is None else into
    for point in points:
        at = point.x // stride
        held = stretches.get(at)
        stretches[at] = point if held is None or stride == 1 else merge_points(held, point)
    return stretches


def widen_stretches(stretches: dict[int, Point], stride: int, most: int) -> tuple[dict[int, Point], int]:
    """Return at most `most` stretches, as short as that allows, and their length."""
    while len(stretches) > max(most, 1):
        stride *= 2
        stretches = fold_points([stretches[at] for at in sorted(stretches)], stride)
    return stretches, stride


def thin_points(points: Iterable[Point], most: int) -> list[Point]:
    """Return at most `most` points, in the order of `x`."""
    stretches, _ = widen_stretches(fold_points(points, 1), 1, most)
    return [stretches[at] for at in sorted(stretches)]
