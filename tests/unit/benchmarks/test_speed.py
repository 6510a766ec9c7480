"""The crowd of the speed table is what it says it is, and driving it measures cycles."""

from __future__ import annotations

from benchmarks.yardsticks.crowd import Crowd, crowd
from benchmarks.yardsticks.speed import Size, cycles, drive
from shoal.sim.cluster_shapes import ClusterShape, nodes_of
from shoal.sim.traces.trace import TraceJob

DAY_S = 86_400.0
JOBS = [
    TraceJob(job_id=str(number), submitted_at=600.0 * number, run_s=7200.0, num_gpus=1 + number % 4)
    for number in range(400)
]


def around(copies: int) -> Crowd:
    nodes = nodes_of(ClusterShape(4, 8))
    return crowd(JOBS, nodes, copies=copies, at=DAY_S, num_waiting=20, num_coming=10)


def test_a_crowd_is_the_log_around_one_moment_as_often_as_asked() -> None:
    one, three = around(1), around(3)
    assert len(three.running) == 3 * len(one.running) == 36
    assert (len(three.waiting), len(three.coming)) == (20, 10)
    assert all(job.submitted_at <= DAY_S < job.submitted_at + job.run_s for job in three.running)
    assert all(job.submitted_at > DAY_S for job in three.coming)


def test_a_crowd_is_made_up_alike_every_time() -> None:
    assert around(2) == around(2)


def test_limits_that_are_made_up_are_never_below_the_run() -> None:
    jobs = around(3).running
    limits = [job.request.time_limit_s for job in jobs]
    assert None in limits
    assert all(limit is None or limit > job.run_s for limit, job in zip(limits, jobs, strict=True))


def test_every_cycle_is_measured_and_as_many_wait_as_should() -> None:
    driven = drive(JOBS, Size(4, 2, 20), num_cycles=12, day=1)
    assert len(driven.plan_s) == 12
    assert driven.num_starts > 0
    assert driven.planner.num_waiting >= 20 - driven.num_starts


def test_the_table_tells_the_growth_from_size_to_size() -> None:
    text = cycles(JOBS, (Size(4, 1, 10), Size(8, 2, 20)), num_cycles=5, day=1)
    assert "goal, p99 under 100 ms" in text
    assert text.count("x, ") >= 1
