"""Keep a curve of any length in a bounded number of points: neighbours are merged, nothing stands out less.

Pure. A curve is cut into stretches of equal length, a power of two, which doubles when they become too many.
Of every stretch the last value stays, with the least and the greatest. Of a step that was made again, the
later value counts: whole while a stretch is one step long, and beyond that as the last, if it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from shoal.samples import Point

MAX_X = (1 << 53) - 1
"""The greatest whole number that every reader of JSON takes for what it is."""


def finite(value: float) -> float | None:
    """The value as it is kept: None for what is not a finite number, however it came about."""
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def single(x: int, value: float) -> Point:
    kept = finite(value)
    return Point(x, kept, kept, kept)


def merged(older: Point, newer: Point) -> Point:
    """Two points of one stretch as one. Of the same `x`, the newer says what the value was."""
    last = newer if newer.x >= older.x else older
    lows = [low for low in (older.low, newer.low) if low is not None]
    highs = [high for high in (older.high, newer.high) if high is not None]
    return Point(last.x, last.last, min(lows, default=None), max(highs, default=None))


def folded(points: Iterable[Point], stride: int, into: dict[int, Point] | None = None) -> dict[int, Point]:
    """The points by stretch, the oldest heard of first. `into` is changed and returned."""
    stretches = {} if into is None else into
    for point in points:
        at = point.x // stride
        held = stretches.get(at)
        stretches[at] = point if held is None or stride == 1 else merged(held, point)
    return stretches


def widened(stretches: dict[int, Point], stride: int, most: int) -> tuple[dict[int, Point], int]:
    """At most so many stretches, as short as that allows, and their length."""
    while len(stretches) > max(most, 1):
        stride *= 2
        stretches = folded([stretches[at] for at in sorted(stretches)], stride)
    return stretches, stride


def thinned(points: Iterable[Point], most: int) -> list[Point]:
    """At most so many points, in the order of `x`."""
    stretches, _ = widened(folded(points, 1), 1, most)
    return [stretches[at] for at in sorted(stretches)]
