"""A curve of any length stays in its bound, and what stands out stays in it."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from shoal.curve import MAX_X, finite, folded, merged, single, thinned, widened
from shoal.samples import Point

VALUES = st.floats(allow_nan=True, allow_infinity=True)
CURVES = st.lists(st.tuples(st.integers(0, 500) | st.integers(0, MAX_X), VALUES), min_size=1, max_size=200)


def latest(curve: list[tuple[int, float]]) -> dict[int, float | None]:
    """What was said last of every step."""
    return {x: finite(value) for x, value in curve}


@given(CURVES, st.integers(1, 50))
def test_curve_is_bounded_in_order_and_keeps_its_last_point_its_least_and_its_greatest(
    curve: list[tuple[int, float]], most: int
) -> None:
    points = thinned([single(x, value) for x, value in curve], most)
    known = latest(curve)
    finite_ones = [value for value in known.values() if value is not None]
    assert 1 <= len(points) <= most
    assert [point.x for point in points] == sorted({point.x for point in points})
    assert (points[-1].x, points[-1].last) == (max(known), known[max(known)])
    lows = [point.low for point in points if point.low is not None]
    highs = [point.high for point in points if point.high is not None]
    assert (min(lows, default=None), max(highs, default=None)) == (
        min(finite_ones, default=None),
        max(finite_ones, default=None),
    )


@given(CURVES)
def test_curve_that_fits_is_what_was_said_last_of_every_step(curve: list[tuple[int, float]]) -> None:
    points = thinned([single(x, value) for x, value in curve], len(curve))
    assert {point.x: point.last for point in points} == latest(curve)


@given(CURVES, CURVES, st.integers(2, 50))
def test_what_is_told_in_two_parts_or_twice_stays_bounded_and_loses_nothing_that_stands_out(
    early: list[tuple[int, float]], late: list[tuple[int, float]], most: int
) -> None:
    stretches, stride = widened(folded([single(x, value) for x, value in early], 1), 1, most)
    new = [single(x, value) for x, value in late]
    for _ in range(2):
        stretches, stride = widened(folded(new, stride, stretches), stride, most)
    assert len(stretches) <= most
    last = max(stretches.values(), key=lambda point: point.x)
    assert last.x == max(x for x, _ in (*early, *late))
    for value in latest(late).values():
        if value is not None:
            assert any(
                point.low is not None and point.high is not None and point.low <= value <= point.high
                for point in stretches.values()
            )


def test_step_that_is_made_again_has_its_later_value() -> None:
    again = [single(step, 1.0) for step in range(10)] + [single(step, 2.0) for step in range(5, 8)]
    assert [point.last for point in thinned(again, 100)] == [1.0] * 5 + [2.0] * 3 + [1.0] * 2


def test_what_is_not_finite_is_a_point_without_a_number() -> None:
    for odd in (math.nan, math.inf, -math.inf, 10**400):
        assert single(3, odd) == Point(3, None, None, None)
    assert merged(single(3, math.nan), single(4, 1.0)) == Point(4, 1.0, 1.0, 1.0)
    assert merged(single(3, 1.0), single(4, math.nan)) == Point(4, None, 1.0, 1.0)
