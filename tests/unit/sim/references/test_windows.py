"""RLScheduler's rules, where they differ from the other references."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.sim.loop import EventBatching, Processors, simulate
from shoal.sim.references.backfilling import Easy, FixedHead, Order, first_come, shortest
from shoal.sim.traces.trace import TraceJob
from tests.support.sim_jobs import trace_job


def starts(
    jobs: Sequence[TraceJob], capacity: int, order: Order, *, is_backfilling: bool = False
) -> list[float]:
    decider = FixedHead(order, is_backfilling=is_backfilling)
    return list(simulate(jobs, Processors(capacity), decider, events=EventBatching.ONE_BY_ONE).starts)


def test_the_head_is_kept_though_a_shorter_job_arrives() -> None:
    assert starts([trace_job(0, 10, 2), trace_job(1, 5, 2), trace_job(2, 1, 2)], 2, shortest) == [0, 10, 15]


def test_the_head_is_the_shortest_of_those_that_wait() -> None:
    jobs = [trace_job(0, 10, 2), trace_job(1, 9, 2), trace_job(2, 8, 2), trace_job(3, 1, 2)]
    assert starts(jobs, 2, shortest) == [0, 10, 20, 19]


def test_an_arrival_is_seen_before_an_end_of_the_same_instant() -> None:
    # Both arrive as the first ends. The longer is seen alone, becomes the head and stays it.
    assert starts([trace_job(0, 5, 1), trace_job(5, 9, 1), trace_job(5, 1, 1)], 1, shortest) == [0, 5, 14]


def test_without_backfill_no_job_passes_the_head() -> None:
    assert starts([trace_job(0, 10, 2), trace_job(1, 5, 3), trace_job(2, 1, 1)], 3, first_come) == [0, 10, 15]


def test_passing_job_must_end_before_the_reservation_not_with_it() -> None:
    jobs = [trace_job(0, 10, 2), trace_job(1, 5, 3), trace_job(2, 8, 1), trace_job(2, 7, 1)]
    assert starts(jobs, 3, first_come, is_backfilling=True) == [0, 10, 15, 2]


def test_there_is_no_rule_of_spare_processors() -> None:
    jobs = [trace_job(0, 10, 3), trace_job(1, 10, 4), trace_job(2, 100, 1)]
    assert starts(jobs, 5, first_come, is_backfilling=True) == [0, 10, 10]


def test_the_reservation_is_not_computed_again() -> None:
    # By limits the head starts at 100. The first ends at 10, so the head could start at 20. The last passes
    # anyway.
    jobs = [trace_job(0, 10, 2, limit_s=100), trace_job(0, 20, 2), trace_job(1, 5, 3), trace_job(2, 60, 2)]
    assert starts(jobs, 4, first_come, is_backfilling=True) == [0, 0, 70, 10]
    assert simulate(jobs, Processors(4), Easy()).starts == [0, 0, 20, 25]
