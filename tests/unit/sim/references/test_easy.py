"""EASY and its variants, on schedules small enough to draw on paper."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.sim.loop import Processors, SimulationState, simulate, true_run
from shoal.sim.references.backfilling import (
    Easy,
    f1,
    first_come,
    reservation,
    shortest,
    shortest_in_truth,
    smallest_area,
)
from shoal.sim.traces.trace import TraceJob
from tests.support.sim_jobs import trace_job


def starts(jobs: Sequence[TraceJob], capacity: int, decider: Easy) -> list[float]:
    return list(simulate(jobs, Processors(capacity), decider).starts)


def test_a_short_job_passes_the_head_and_a_long_one_does_not() -> None:
    # 3 of 4 are taken to 10, the head needs 4. Until then one processor is free: enough for 5 s, not for 20
    # s.
    jobs = [trace_job(0, 10, 3), trace_job(1, 10, 4), trace_job(2, 5, 1), trace_job(3, 20, 1)]
    assert starts(jobs, 4, Easy()) == [0, 10, 2, 20]


def test_a_long_job_passes_on_processors_the_head_will_not_need() -> None:
    # At 10 five are free and the head takes four: one job may run past it, not two.
    jobs = [trace_job(0, 10, 3), trace_job(1, 10, 4), trace_job(2, 100, 1), trace_job(2, 100, 1)]
    assert starts(jobs, 5, Easy()) == [0, 10, 2, 20]


def test_a_job_that_ends_with_the_reservation_passes() -> None:
    jobs = [trace_job(0, 10, 1), trace_job(1, 5, 2), trace_job(2, 8, 1)]
    assert starts(jobs, 2, Easy()) == [0, 10, 2]


def test_backfill_can_try_the_shortest_first() -> None:
    jobs = [trace_job(0, 10, 3), trace_job(1, 10, 4), trace_job(2, 8, 1), trace_job(2, 3, 1)]
    assert starts(jobs, 4, Easy()) == [0, 10, 2, 20]
    assert starts(jobs, 4, Easy(first_come, shortest)) == [0, 10, 20, 2]


def test_limits_delay_the_head_where_true_run_times_do_not() -> None:
    # By its limit the first runs to 100, so the third may start at 2 and run to 22; in truth it ends at 10.
    jobs = [trace_job(0, 10, 3, limit_s=100), trace_job(1, 10, 4), trace_job(2, 20, 1)]
    assert starts(jobs, 4, Easy()) == [0, 22, 2]
    truth = Easy(first_come, shortest_in_truth, expect=true_run)
    assert simulate(jobs, Processors(4), truth, expect=true_run).starts == [0, 10, 20]


def test_the_shortest_becomes_head_when_it_arrives() -> None:
    jobs = [trace_job(0, 10, 2), trace_job(1, 5, 2), trace_job(2, 1, 2)]
    assert starts(jobs, 2, Easy(shortest, shortest)) == [0, 11, 10]


def test_smallest_area_counts_time_and_processors() -> None:
    jobs = [trace_job(0, 10, 4), trace_job(1, 5, 4), trace_job(1, 6, 3)]
    assert starts(jobs, 4, Easy(smallest_area, smallest_area)) == [0, 16, 10]


def test_f1_prefers_the_early_unless_the_late_is_much_smaller() -> None:
    assert f1(trace_job(100, 10, 1)) < f1(trace_job(200, 10, 1))
    assert f1(trace_job(1000, 10, 1)) < f1(trace_job(1000, 1000, 1)) < f1(trace_job(1000, 1000, 8))
    assert f1(trace_job(1010, 10, 1)) < f1(trace_job(1000, 10000, 64))
    assert f1(trace_job(0, 10, 1)) == 1 - 870


def test_of_two_alike_the_first_come_goes_first() -> None:
    jobs = [trace_job(0, 10, 2), trace_job(1, 5, 2), trace_job(1, 5, 2)]
    assert starts(jobs, 2, Easy(shortest, shortest)) == [0, 10, 15]


def test_a_reservation_counts_everything_that_ends_with_it() -> None:
    state = SimulationState([trace_job(0, 10, 2), trace_job(0, 10, 3), trace_job(0, 20, 1)], Processors(6))
    state.now, state.machine.free, state.releases = 0, 0, [(10, 0), (10, 1), (20, 2)]
    assert reservation(state, 2) == (10, 3)
    assert reservation(state, 6) == (20, 0)
