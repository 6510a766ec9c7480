"""RLScheduler's rules, where they differ from everybody's."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.sim.loop import Events, simulate
from shoal.sim.machine import Processors
from shoal.sim.references.easy import Easy
from shoal.sim.references.order import Order, first_come, shortest
from shoal.sim.references.windows import KeptHead
from shoal.sim.traces.job import TraceJob
from tests.support.traces import job


def starts(
    jobs: Sequence[TraceJob], capacity: int, order: Order, *, is_backfilling: bool = False
) -> list[float]:
    decider = KeptHead(order, is_backfilling=is_backfilling)
    return list(simulate(jobs, Processors(capacity), decider, events=Events.ONE_BY_ONE).starts)


def test_the_head_is_kept_though_a_shorter_job_arrives() -> None:
    assert starts([job(0, 10, 2), job(1, 5, 2), job(2, 1, 2)], 2, shortest) == [0, 10, 15]


def test_the_head_is_the_shortest_of_those_that_wait() -> None:
    jobs = [job(0, 10, 2), job(1, 9, 2), job(2, 8, 2), job(3, 1, 2)]
    assert starts(jobs, 2, shortest) == [0, 10, 20, 19]


def test_an_arrival_is_seen_before_an_end_of_the_same_instant() -> None:
    # Both come as the first ends; the longer is looked at alone, becomes the head and is kept.
    assert starts([job(0, 5, 1), job(5, 9, 1), job(5, 1, 1)], 1, shortest) == [0, 5, 14]


def test_without_backfill_nobody_passes_the_head() -> None:
    assert starts([job(0, 10, 2), job(1, 5, 3), job(2, 1, 1)], 3, first_come) == [0, 10, 15]


def test_who_passes_must_end_before_the_reservation_not_with_it() -> None:
    jobs = [job(0, 10, 2), job(1, 5, 3), job(2, 8, 1), job(2, 7, 1)]
    assert starts(jobs, 3, first_come, is_backfilling=True) == [0, 10, 15, 2]


def test_there_is_no_rule_of_spare_processors() -> None:
    jobs = [job(0, 10, 3), job(1, 10, 4), job(2, 100, 1)]
    assert starts(jobs, 5, first_come, is_backfilling=True) == [0, 10, 10]


def test_the_reservation_is_not_computed_again() -> None:
    # By limits the head starts at 100. The first ends at 10, so it could at 20; the last passes even so.
    jobs = [job(0, 10, 2, limit_s=100), job(0, 20, 2), job(1, 5, 3), job(2, 60, 2)]
    assert starts(jobs, 4, first_come, is_backfilling=True) == [0, 0, 70, 10]
    assert simulate(jobs, Processors(4), Easy()).starts == [0, 0, 20, 25]
