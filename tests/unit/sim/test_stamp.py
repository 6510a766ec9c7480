"""What jobs of a twin are ordered by: from those that have ended, never from themselves."""

from __future__ import annotations

from shoal.scheduler import Policy
from shoal.sim.stamp import LimitStamper
from shoal.sim.twin import replay
from tests.support.workloads import gpu_cluster, work

HOUR = 3600.0


def test_of_two_that_wait_the_forecast_lets_the_shorter_go_first() -> None:
    jobs = work(0, HOUR, 8), work(10, HOUR, 8), work(20, 60, 8)
    learned = replay(gpu_cluster(*jobs), Policy())
    assert list(learned.starts) == [0, HOUR + 60, HOUR]
    by_limits = replay(gpu_cluster(*jobs), Policy(), stamper=LimitStamper())
    assert list(by_limits.starts) == [0, HOUR, 2 * HOUR]


def test_a_user_whose_jobs_were_short_goes_before_one_whose_jobs_were_long() -> None:
    # All ask for the same two hours; only what ended before tells ana's next from ben's.
    past = [work(10_000 * n, 60, 8, limit_s=2 * HOUR, user="ana") for n in range(4)]
    past += [work(10_000 * n + 1000, HOUR, 8, limit_s=2 * HOUR, user="ben") for n in range(4)]
    blocker = work(50_000, 500, 8, limit_s=2 * HOUR, user="eve")
    ben = work(50_001, HOUR, 8, limit_s=2 * HOUR, user="ben")
    ana = work(50_002, HOUR, 8, limit_s=2 * HOUR, user="ana")
    jobs = sorted(past, key=lambda job: job.submitted_at)
    outcome = replay(gpu_cluster(*jobs, blocker, ben, ana), Policy())
    *_, of_ben, of_ana = outcome.starts
    assert of_ana == 50_500
    assert of_ben == 50_500 + HOUR
