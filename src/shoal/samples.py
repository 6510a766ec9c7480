"""Points of curves, as supervisors measure them and the store keeps them.

A leaf: it imports nothing of ours.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Axis(StrEnum):
    """What a curve of numbers runs along."""

    STEP = "step"
    TIME = "time"
    """Milliseconds since 1970, by the clock of the node that measured."""


class Point(msgspec.Struct, frozen=True, array_like=True):
    """One value, or a stretch of neighbours: the last of them at `x`, the least and the greatest.

    None: not a finite number.
    """

    x: int
    last: float | None
    low: float | None
    high: float | None


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """What one node has measured of one thing since it last told."""

    name: str
    axis: Axis
    points: tuple[Point, ...]
    """In the order of `x`; of a step that was made twice, the later."""
    rank: int | None = None
    """Whose word it is; None: of the node."""
    newest: Point | None = None
    """What was said last, where steps were made again; None: the last of `points`."""
