"""Fairness: what tenants got against what they were entitled to, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.sim.fairness import fairness, max_min
from shoal.sim.outcome import Outcome
from tests.support.workloads import gpu_cluster, work

HOUR = 3600.0


def outcome(*stays: tuple[int, float, float, float], num_jobs: int = 2) -> Outcome:
    """Jobs submitted at 0, and when each held how many devices."""
    found = Outcome(gpu_cluster(*(work(0, HOUR, 8) for _ in range(num_jobs))))
    for stay in stays:
        found.stays.note(*stay)
    return found


def test_nobody_is_entitled_to_more_than_it_wants_and_the_rest_is_divided() -> None:
    given = max_min(np.array([[10.0, 100.0, 100.0]]), np.array([90.0]), np.ones(3))
    assert given.tolist() == [[10.0, 40.0, 40.0]]


def test_weights_divide_what_is_wanted_by_all() -> None:
    given = max_min(np.array([[100.0, 100.0]]), np.array([90.0]), np.array([1.0, 2.0]))
    assert given.tolist() == [[30.0, 60.0]]


def test_two_that_hold_equal_parts_are_treated_fairly() -> None:
    told = fairness(outcome((0, 4, 0, HOUR), (1, 4, 0, HOUR)), ["a", "b"])
    assert told.error == pytest.approx(0)
    assert told.parts["a"].received == pytest.approx(4 * HOUR)


def test_one_that_waits_while_another_holds_all_is_owed_half() -> None:
    # In each of two hours one holds all eight and the other wants as much: in the first `b` waits, in the
    # second nobody does.
    told = fairness(outcome((0, 8, 0, HOUR), (1, 8, HOUR, 2 * HOUR)), ["a", "b"])
    assert told.parts["a"].entitled == pytest.approx(4 * HOUR)
    assert told.parts["b"].entitled == pytest.approx(4 * HOUR + 8 * HOUR)
    assert told.error == pytest.approx((4 + 4) * HOUR / (2 * 16 * HOUR))
    assert told.parts["a"].error == pytest.approx(0)
    assert told.parts["b"].missed == pytest.approx(4 * HOUR)
    assert told.parts["b"].error == pytest.approx(1 / 3)


def test_a_job_that_was_cut_short_is_wanted_again_from_then_on() -> None:
    stays = outcome((0, 8, 0, HOUR), (1, 8, HOUR, 2 * HOUR), (0, 8, 2 * HOUR, 3 * HOUR))
    told = fairness(stays, ["a", "b"])
    # In the second hour `a` waits again: it is owed half of that, and `b` half of the first.
    assert told.parts["a"].entitled == pytest.approx((4 + 4 + 8) * HOUR)


def test_one_tenant_alone_is_always_treated_fairly() -> None:
    assert fairness(outcome((0, 8, 0, HOUR), (1, 8, HOUR, 2 * HOUR)), ["a", "a"]).error == pytest.approx(0)
