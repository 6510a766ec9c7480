"""Newcomers that are looked at alone start as they would if everybody were looked at."""

from __future__ import annotations

from shoal.scheduler import Planner, Policy, Snapshot
from tests.support.clusters import ALL_GPUS, NOW, holding, job, nodes, request


def test_newcomer_that_fell_due_since_the_last_plan_comes_before_who_is_not() -> None:
    held = (holding(1, {"node-01": (0,)}, time_limit_s=9000.0),)
    head = job(2, request(gpus=8, time_limit_s=60.0), due_at=NOW + 900.0, score=1.0)
    planner = Planner.of(Snapshot(nodes=nodes(1), holdings=held, candidates=(head,)), Policy())
    assert [one.attempt_id for one in planner.plan(NOW).promises] == ["att-2"]
    planner.add(job(3, request(gpus=8, time_limit_s=60.0), due_at=NOW + 5.0, score=2.0))
    again = Planner.of(planner.snapshot(), planner.policy).plan(NOW + 5.0)
    made = planner.plan(NOW + 5.0)
    assert [one.attempt_id for one in again.promises] == ["att-3"]
    assert made.promises == again.promises


def test_newcomer_is_not_kept_from_nodes_that_one_of_another_queue_and_lesser_rank_was_promised() -> None:
    held = (
        holding(1, {"node-01": ALL_GPUS}),
        holding(2, {"node-02": (0,)}, time_limit_s=9000.0),
    )
    first = job(3, request(gpus=8, nodes=2), queue="night", priority=1)
    lesser = job(4, request(gpus=8))
    planner = Planner.of(Snapshot(nodes=nodes(2), holdings=held, candidates=(first, lesser)), Policy())
    assert [one.attempt_id for one in planner.plan(NOW).promises] == ["att-4"]
    planner.add(job(5, request(gpus=7), queue="night", priority=1))
    again = Planner.of(planner.snapshot(), planner.policy).plan(NOW + 1)
    made = planner.plan(NOW + 1)
    assert [one.attempt_id for one in again.starts] == ["att-5"]
    assert (made.starts, made.promises) == (again.starts, again.promises)


def test_clock_that_is_set_back_keeps_back_again_who_had_waited_for_a_moment() -> None:
    full = holding(1, {"node-01": ALL_GPUS})
    early = job(2, request(gpus=8), not_before=NOW)
    planner = Planner.of(Snapshot(nodes=nodes(1), holdings=(full,), candidates=(early,)), Policy())
    planner.plan(NOW + 1)
    planner.release(full.attempt_id, NOW + 1)
    assert planner.plan(NOW - 60).starts == ()
    assert [start.attempt_id for start in planner.plan(NOW).starts] == ["att-2"]
    assert planner.plan(NOW - 60).starts == ()
    planner.undo("att-2")
    assert planner.plan(NOW - 60).starts == ()
    assert [start.attempt_id for start in planner.plan(NOW).starts] == ["att-2"]
