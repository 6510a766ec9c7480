"""A curve of any length stays within its bound and keeps its extreme values."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from shoal.curve import (
    MAX_X,
    Point,
    finite,
    fold_points,
    merge_points,
    single_point,
    thin_points,
    widen_stretches,
)

VALUES = st.floats(allow_nan=True, allow_infinity=True)
CURVES = st.lists(st.tuples(st.integers(0, 500) | st.integers(0, MAX_X), VALUES), min_size=1, max_size=200)


def latest(curve: list[tuple[int, float]]) -> dict[int, float | None]:
    """Return the last value of every step."""
    return {x: finite(value) for x, value in curve}


@given(CURVES, st.integers(1, 50))
def test_curve_is_bounded_in_order_and_keeps_its_last_point_its_least_and_its_greatest(
    curve: list[tuple[int, float]], most: int
) -> None:
    points = thin_points([single_point(x, value) for x, value in curve], most)
    last_values = latest(curve)
    finite_ones = [value for value in last_values.values() if value is not None]
    assert 1 <= len(points) <= most
    assert [point.x for point in points] == sorted({point.x for point in points})
    assert (points[-1].x, points[-1].last) == (max(last_values), last_values[max(last_values)])
    lows = [point.low for point in points if point.low is not None]
    highs = [point.high for point in points if point.high is not None]
    assert (min(lows, default=None), max(highs, default=None)) == (
        min(finite_ones, default=None),
        max(finite_ones, default=None),
    )


@given(CURVES)
def test_curve_that_fits_has_the_last_value_of_every_step(curve: list[tuple[int, float]]) -> None:
    points = thin_points([single_point(x, value) for x, value in curve], len(curve))
    assert {point.x: point.last for point in points} == latest(curve)


@given(CURVES, CURVES, st.integers(2, 50))
def test_curve_merged_in_parts_or_twice_stays_bounded_and_keeps_extremes(
    early: list[tuple[int, float]], late: list[tuple[int, float]], most: int
) -> None:
    stretches, stride = widen_stretches(
        fold_points([single_point(x, value) for x, value in early], 1), 1, most
    )
    new = [single_point(x, value) for x, value in late]
    for _ in range(2):
        stretches, stride = widen_stretches(fold_points(new, stride, stretches), stride, most)
    assert len(stretches) <= most
    last = max(stretches.values(), key=lambda point: point.x)
    assert last.x == max(x for x, _ in (*early, *late))
    for value in latest(late).values():
        if value is not None:
            assert any(
                point.low is not None and point.high is not None and point.low <= value <= point.high
                for point in stretches.values()
            )


def test_repeated_step_has_its_later_value() -> None:
    repeated = [single_point(step, 1.0) for step in range(10)] + [
        single_point(step, 2.0) for step in range(5, 8)
    ]
    assert [point.last for point in thin_points(repeated, 100)] == [1.0] * 5 + [2.0] * 3 + [1.0] * 2


def test_non_finite_value_is_a_point_without_a_number() -> None:
    for odd in (math.nan, math.inf, -math.inf, 10**400):
        assert single_point(3, odd) == Point(3, None, None, None)
    assert merge_points(single_point(3, math.nan), single_point(4, 1.0)) == Point(4, 1.0, 1.0, 1.0)
    assert merge_points(single_point(3, 1.0), single_point(4, math.nan)) == Point(4, None, 1.0, 1.0)
