"""Curves drawn with letters: one line high in a table, or with axes on the whole screen. Pure."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from shoal.cli.text import size

Point = Sequence[float | None]
"""`x`, last, low, high, as the API gives it."""
BLOCKS, PLAIN = "▁▂▃▄▅▆▇█", "_.-=+*#%"
NO_NUMBER = "x"
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def sparkline(points: Sequence[Point], columns: int, *, letters: str = BLOCKS) -> str:
    """The last values, from left to right, one letter each; `x` for what is not a number."""
    values = [point[1] for point in _across(points, columns)]
    known = [value for value in values if value is not None]
    if not known:
        return NO_NUMBER * len(values)
    low, reach = min(known), max(known) - min(known)
    top = len(letters) - 1
    return "".join(
        NO_NUMBER if value is None else letters[round((value - low) / reach * top) if reach else 0]
        for value in values
    )


def drawn(points: Sequence[Point], axis: str, *, columns: int, rows: int) -> list[str]:
    """A curve over its axes: `*` the value, `:` from least to greatest where neighbours were merged."""
    lows = [point[2] for point in points if point[2] is not None]
    highs = [point[3] for point in points if point[3] is not None]
    if not lows or not highs:
        return ["no finite value"]
    low, high = min(lows), max(highs)
    if low == high:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    labels = [figure(high - (high - low) * row / (rows - 1)) for row in range(rows)]
    margin = max(map(len, labels))
    field = _field(points, low, high, columns=max(columns - margin - 3, 10), rows=rows)
    lines = [
        f"{label:>{margin}} |{''.join(line)}".rstrip() for label, line in zip(labels, field, strict=True)
    ]
    first, last = (moment(points[at][0] or 0, axis) for at in (0, -1))
    width = len(field[0])
    return [
        *lines,
        f"{'':>{margin}} +{'-' * width}",
        f"{'':>{margin}}  {first}{last:>{max(width - len(first), len(last) + 1)}}",
    ]


def _field(points: Sequence[Point], low: float, high: float, *, columns: int, rows: int) -> list[list[str]]:
    field = [[" "] * columns for _ in range(rows)]
    left, right = points[0][0] or 0, points[-1][0] or 0

    def row_of(value: float) -> int:
        return round((high - value) / (high - low) * (rows - 1))

    for x, last, least, most in points:
        column = round(((x or 0) - left) / (right - left) * (columns - 1)) if right > left else 0
        if least is not None and most is not None:
            for row in range(row_of(most), row_of(least) + 1):
                if field[row][column] == " ":
                    field[row][column] = ":"
        if last is not None:
            field[row_of(last)][column] = "*"
    return field


def _across(points: Sequence[Point], columns: int) -> list[Point]:
    """At most so many of them, evenly, the last one always."""
    if len(points) <= columns:
        return list(points)
    each = len(points) / columns
    return [points[min(math.ceil((at + 1) * each), len(points)) - 1] for at in range(columns)]


def figure(value: float | None, name: str = "") -> str:
    """A number in about seven letters; of what is called bytes, in units of 1024."""
    if value is None:
        return "not finite"
    if name.endswith("_bytes"):
        return size(value)
    for amount, unit in UNITS:
        if abs(value) >= amount * 10:
            return f"{value / amount:.4g}{unit}"
    return f"{value:.4g}"


def moment(x: float, axis: str) -> str:
    """Where on its axis: `step 1200`, or the time of day in UTC."""
    return f"step {int(x)}" if axis == "step" else time.strftime("%m-%d %H:%M:%SZ", time.gmtime(x / 1000))
