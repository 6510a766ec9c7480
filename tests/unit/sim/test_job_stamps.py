"""The order of jobs in a twin comes from jobs that have ended, never from the waiting jobs themselves."""

from __future__ import annotations

from shoal.scheduler import Policy
from shoal.sim.assumptions import LimitStamper
from shoal.sim.twin import simulate_workload
from tests.support.sim_jobs import gpu_cluster, work_job

HOUR = 3600.0


def test_of_two_that_wait_the_forecast_lets_the_shorter_go_first() -> None:
    jobs = work_job(0, HOUR, 8), work_job(10, HOUR, 8), work_job(20, 60, 8)
    learned = simulate_workload(gpu_cluster(*jobs), Policy())
    assert list(learned.starts) == [0, HOUR + 60, HOUR]
    by_limits = simulate_workload(gpu_cluster(*jobs), Policy(), stamper=LimitStamper())
    assert list(by_limits.starts) == [0, HOUR, 2 * HOUR]


def test_a_user_whose_jobs_were_short_goes_before_one_whose_jobs_were_long() -> None:
    # All ask for the same two hours. Only the ended jobs tell ana's next job from ben's.
    past = [work_job(10_000 * n, 60, 8, limit_s=2 * HOUR, user="ana") for n in range(4)]
    past += [work_job(10_000 * n + 1000, HOUR, 8, limit_s=2 * HOUR, user="ben") for n in range(4)]
    blocker = work_job(50_000, 500, 8, limit_s=2 * HOUR, user="eve")
    ben = work_job(50_001, HOUR, 8, limit_s=2 * HOUR, user="ben")
    ana = work_job(50_002, HOUR, 8, limit_s=2 * HOUR, user="ana")
    jobs = sorted(past, key=lambda job: job.submitted_at)
    outcome = simulate_workload(gpu_cluster(*jobs, blocker, ben, ana), Policy())
    *_, of_ben, of_ana = outcome.starts
    assert of_ana == 50_500
    assert of_ben == 50_500 + HOUR
