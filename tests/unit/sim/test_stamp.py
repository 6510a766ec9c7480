"""What a job is given at its submission: from those that have ended, never from itself."""

from __future__ import annotations

import msgspec

from shoal.scheduler import Policy
from shoal.sim.stamp import ForecastStamper, LimitStamper, Stamp
from shoal.sim.twin import replay
from tests.support.workloads import gpu_cluster, work

HOUR = 3600.0


def test_a_stamp_does_not_depend_on_how_long_the_job_will_run() -> None:
    workload = gpu_cluster(work(0, 10, 8, limit_s=HOUR))
    stamper = ForecastStamper(workload)
    short, long = (stamper.stamp(work(0, run_s, 8, limit_s=HOUR), 0) for run_s in (10, HOUR))
    assert short == long


def test_jobs_of_a_user_are_expected_to_run_as_those_before() -> None:
    first = work(0, 600, 8, limit_s=24 * HOUR, user="ana")
    stamper = ForecastStamper(gpu_cluster(first))
    before = stamper.stamp(first, 0).expected_s
    for _ in range(10):
        stamper.ended(first, 600)
    after = stamper.stamp(msgspec.structs.replace(first, submitted_at=1000), 1000).expected_s
    assert before is not None
    assert after is not None
    assert after < before
    assert 500 < after < 900


def test_a_job_is_due_after_its_submission() -> None:
    workload = gpu_cluster(work(50, 600, 8))
    due_at = ForecastStamper(workload).stamp(workload.jobs[0], 50).due_at
    assert due_at is not None
    assert due_at > 50


def test_the_limit_alone_says_nothing_of_when_a_job_is_due() -> None:
    assert LimitStamper().stamp(work(0, 10, limit_s=60), 0) == Stamp(expected_s=60)


def test_of_two_that_wait_the_forecast_lets_the_shorter_go_first() -> None:
    jobs = work(0, HOUR, 8), work(10, HOUR, 8), work(20, 60, 8)
    learned = replay(gpu_cluster(*jobs), Policy())
    assert list(learned.starts) == [0, HOUR + 60, HOUR]
    by_limits = replay(gpu_cluster(*jobs), Policy(), stamper=LimitStamper())
    assert list(by_limits.starts) == [0, HOUR, 2 * HOUR]
