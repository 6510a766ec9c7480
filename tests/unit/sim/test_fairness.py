"""Fairness: results that were worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.sim.fairness import fairness, max_min
from shoal.sim.workload import SimulationOutcome
from tests.support.sim_jobs import gpu_cluster, work_job

HOUR = 3600.0


def outcome(*stays: tuple[int, float, float, float], num_jobs: int = 2) -> SimulationOutcome:
    """Jobs submitted at 0, and how many devices each held when."""
    result = SimulationOutcome(gpu_cluster(*(work_job(0, HOUR, 8) for _ in range(num_jobs))))
    for stay in stays:
        result.holdings.note(*stay)
    return result


def test_no_tenant_is_entitled_to_more_than_its_demand_and_the_rest_is_divided() -> None:
    given = max_min(np.array([[10.0, 100.0, 100.0]]), np.array([90.0]), np.ones(3))
    assert given.tolist() == [[10.0, 40.0, 40.0]]


def test_weights_divide_a_contended_supply() -> None:
    given = max_min(np.array([[100.0, 100.0]]), np.array([90.0]), np.array([1.0, 2.0]))
    assert given.tolist() == [[30.0, 60.0]]


def test_two_tenants_that_hold_equal_parts_are_treated_fairly() -> None:
    result = fairness(outcome((0, 4, 0, HOUR), (1, 4, 0, HOUR)), ["a", "b"])
    assert result.error == pytest.approx(0)
    assert result.parts["a"].received == pytest.approx(4 * HOUR)


def test_tenant_that_waits_while_another_holds_all_is_owed_half() -> None:
    # In each of two hours one tenant holds all eight. In the first hour `b` waits; in the second no tenant
    # does.
    result = fairness(outcome((0, 8, 0, HOUR), (1, 8, HOUR, 2 * HOUR)), ["a", "b"])
    assert result.parts["a"].entitled == pytest.approx(4 * HOUR)
    assert result.parts["b"].entitled == pytest.approx(4 * HOUR + 8 * HOUR)
    assert result.error == pytest.approx((4 + 4) * HOUR / (2 * 16 * HOUR))
    assert result.parts["a"].error == pytest.approx(0)
    assert result.parts["b"].missed == pytest.approx(4 * HOUR)
    assert result.parts["b"].error == pytest.approx(1 / 3)


def test_a_job_that_was_cut_short_counts_as_demand_again() -> None:
    stays = outcome((0, 8, 0, HOUR), (1, 8, HOUR, 2 * HOUR), (0, 8, 2 * HOUR, 3 * HOUR))
    result = fairness(stays, ["a", "b"])
    # In the second hour `a` waits again, so it is owed half of that hour, and `b` half of the first.
    assert result.parts["a"].entitled == pytest.approx((4 + 4 + 8) * HOUR)


def test_one_tenant_alone_is_always_treated_fairly() -> None:
    assert fairness(outcome((0, 8, 0, HOUR), (1, 8, HOUR, 2 * HOUR)), ["a", "a"]).error == pytest.approx(0)
