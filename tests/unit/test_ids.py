"""Ids sort by creation time, whatever the clock does."""

from __future__ import annotations

from itertools import pairwise

from shoal.ids import id_factory


def test_ids_made_in_the_same_instant_sort_in_the_order_they_were_made() -> None:
    new_id = id_factory(lambda: 1_800_000_000.0)
    made = [new_id("job") for _ in range(200)]
    assert all(a < b for a, b in pairwise(made))


def test_a_clock_that_is_set_back_does_not_reorder_ids() -> None:
    times = iter([1_800_003_600.0, 1_800_000_000.0, 1_800_007_200.0])
    new_id = id_factory(lambda: next(times))
    first, second, third = (new_id("job") for _ in range(3))
    assert first < second < third


def test_ids_are_unique_though_randomness_repeats() -> None:
    new_id = id_factory(lambda: 1_800_000_000.0, bytes)
    assert len({new_id("job") for _ in range(100)}) == 100
