"""Metrics of schedules whose numbers are known."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest

from shoal.sim.loop import Schedule
from shoal.sim.report import Distribution, gpus, measure, slowdowns
from tests.support.sim_jobs import trace_job


def test_percentiles_are_values_that_occurred() -> None:
    distribution = Distribution.of(np.arange(1.0, 1001.0))
    assert distribution == Distribution(mean=500.5, p50=500, p95=950, p99_9=999, max=1000)


def test_one_job_is_its_own_percentiles() -> None:
    assert Distribution.of(np.array([7.0])) == Distribution(7, 7, 7, 7, 7)


def test_slowdown_is_bounded_below_and_short_jobs_count_as_ten_seconds() -> None:
    jobs = [trace_job(0, 100), trace_job(0, 1), trace_job(10, 1)]
    assert slowdowns(Schedule(jobs, [100, 5, 109])).tolist() == [2, 1, 10]


def test_measures_of_two_jobs_on_four_processors() -> None:
    measures = measure(Schedule([trace_job(0, 10, 2), trace_job(5, 20, 4)], [0, 10]), capacity=4)
    assert measures.num_jobs == 2
    assert (measures.wait_s.mean, measures.wait_s.max) == (2.5, 5)
    assert (measures.completion_s.mean, measures.completion_s.max) == (17.5, 25)
    assert measures.slowdown.max == 1.25
    assert measures.utilisation == pytest.approx((20 + 80) / (4 * 30))


def test_utilisation_can_count_gpus() -> None:
    measures = measure(Schedule([trace_job(0, 10, gpus=3)], [0]), capacity=6, amount=gpus)
    assert measures.utilisation == 0.5


def test_measures_become_a_table_and_json() -> None:
    measures = measure(Schedule([trace_job(0, 10, 2)], [2]), capacity=4)
    assert measures.rows()[:2] == [
        ["", "mean", "p50", "p95", "p99.9", "max"],
        ["wait s", "2.00", "2.00", "2.00", "2.00", "2.00"],
    ]
    assert json.loads(msgspec.json.encode(measures))["slowdown"]["p99_9"] == 1.2
