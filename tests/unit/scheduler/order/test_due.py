"""When a waiting job is due, and what it scores until then."""

from __future__ import annotations

from shoal.scheduler.order.due import MOST_S, WIDE_S, due_time, needs_restamp, score
from shoal.scheduler.prediction.forecast import Expectation

HOUR = 3600.0


def expecting(expected_s: float, *, sure_s: float = 0.0) -> Expectation:
    return Expectation(expected_s=expected_s, sure_s=sure_s)


def test_job_of_seconds_is_due_within_minutes() -> None:
    assert due_time(100.0, expecting(9.0), 0.0) == 100 + 630


def test_long_job_is_due_after_the_most_slack() -> None:
    assert due_time(100.0, expecting(500 * HOUR), 0.0) == 100 + MOST_S


def test_job_of_an_hour_is_due_after_three_and_a_half() -> None:
    assert due_time(0.0, expecting(HOUR), 0.0) == 3.5 * HOUR


def test_job_as_wide_as_the_cluster_is_due_later_by_a_fixed_time() -> None:
    assert due_time(0.0, expecting(HOUR), 1.0) == 3.5 * HOUR + WIDE_S
    assert due_time(0.0, expecting(HOUR), 0.5) == 3.5 * HOUR + WIDE_S / 2


def test_job_wider_than_the_cluster_is_now_waits_no_longer_for_that() -> None:
    assert due_time(0.0, expecting(HOUR), 4.0) == due_time(0.0, expecting(HOUR), 1.0)


def test_job_that_surely_runs_long_may_wait_long() -> None:
    assert due_time(0.0, expecting(10 * HOUR, sure_s=9 * HOUR), 0.1) == 450 * HOUR


def test_half_as_long_weighs_as_much_as_a_quarter_as_wide() -> None:
    assert score(HOUR / 2, 0.4) == score(HOUR, 0.1)


def test_runs_of_seconds_score_alike() -> None:
    assert score(1.0, 0.1) == score(9.0, 0.1)


def test_keys_follow_a_forecast_that_doubled_or_halved() -> None:
    assert needs_restamp(100.0, 200.0)
    assert needs_restamp(100.0, 50.0)
    assert not needs_restamp(100.0, 199.0)
    assert not needs_restamp(100.0, 51.0)
