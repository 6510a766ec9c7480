"""A loss curve for a terminal, from what a training printed: steps to the right, loss upwards by factors.

Log lines in, text out; asks nobody.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

STEP = re.compile(r"step +(\d+) of \d+ +loss ([0-9.]+)")
COLUMNS, ROWS = 64, 10
MARGIN = 8


@dataclass(frozen=True)
class Point:
    """The end of one step, as its log line tells it."""

    at: float
    step: int
    loss: float


@dataclass(frozen=True)
class Mark:
    """Something that happened at this step. `sign`: one character."""

    sign: str
    step: int
    what: str


def points_of(lines: Iterable[dict[str, Any]]) -> list[Point]:
    """The steps a log tells of, in its order; one that was made again is there twice."""
    found = ((line["at"], STEP.match(line["text"])) for line in lines)
    return [Point(at, int(match[1]), float(match[2])) for at, match in found if match]


def step_at(points: Sequence[Point], moment: float) -> int:
    """How far the training was at this moment."""
    return max((point.step for point in points if point.at <= moment), default=0)


def plot(points: Sequence[Point], marks: Sequence[Mark]) -> str:
    """The curve, with each mark below the step it belongs to, and what the marks mean."""
    steps = [point.step for point in points]
    last = max(steps)
    columns: dict[int, list[float]] = {}
    for point in points:
        columns.setdefault(_column(point.step, last), []).append(point.loss)
    heights = {column: math.log(sum(found) / len(found)) for column, found in columns.items()}
    low, high = min(heights.values()), max(heights.values())
    span = (high - low) or 1.0
    rows = [[" "] * COLUMNS for _ in range(ROWS)]
    for column, height in heights.items():
        rows[ROWS - 1 - round((height - low) / span * (ROWS - 1))][column] = "*"
    labels = {0: f"{math.exp(high):.2f}", ROWS - 1: f"{math.exp(low):.2f}"}
    lines = [f"{labels.get(i, ''):>{MARGIN - 2}} |{''.join(row).rstrip()}" for i, row in enumerate(rows)]
    lines.append(" " * (MARGIN - 2) + " +" + "-" * COLUMNS)
    lines.append(" " * MARGIN + _signs(marks, last))
    return "\n".join((*lines, *(f"{mark.sign:>{MARGIN}} {mark.what}, at step {mark.step}" for mark in marks)))


def _signs(marks: Sequence[Mark], last: int) -> str:
    """The line below the axis. Two that fall together stand beside each other."""
    signs = [" "] * (COLUMNS + len(marks))
    for mark in marks:
        at = _column(mark.step, last)
        signs[next(i for i in range(at, len(signs)) if signs[i] == " ")] = mark.sign
    return "".join(signs).rstrip()


def _column(step: int, last: int) -> int:
    return min(COLUMNS - 1, step * COLUMNS // (last + 1))
