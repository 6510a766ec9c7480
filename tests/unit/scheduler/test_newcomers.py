"""Newcomers that are considered alone start as they would in a complete cycle."""

from __future__ import annotations

from shoal.scheduler import Planner, Policy, Snapshot
from tests.support.clusters import ALL_GPUS, NOW, candidate, holding, nodes, request


def test_newcomer_due_since_the_last_plan_comes_before_jobs_not_due() -> None:
    held = (holding(1, {"node-01": (0,)}, time_limit_s=9000.0),)
    head = candidate(2, request(gpus=8, time_limit_s=60.0), due_at=NOW + 900.0, score=1.0)
    planner = Planner.of(Snapshot(nodes=nodes(1), holdings=held, candidates=(head,)), Policy())
    assert [promise.attempt_id for promise in planner.plan(NOW).promises] == ["att-2"]
    planner.add(candidate(3, request(gpus=8, time_limit_s=60.0), due_at=NOW + 5.0, score=2.0))
    fresh = Planner.of(planner.snapshot(), planner.policy).plan(NOW + 5.0)
    result = planner.plan(NOW + 5.0)
    assert [promise.attempt_id for promise in fresh.promises] == ["att-3"]
    assert result.promises == fresh.promises


def test_newcomer_may_use_nodes_promised_to_a_lower_rank_of_another_queue() -> None:
    held = (
        holding(1, {"node-01": ALL_GPUS}),
        holding(2, {"node-02": (0,)}, time_limit_s=9000.0),
    )
    first = candidate(3, request(gpus=8, nodes=2), queue="night", priority=1)
    lesser = candidate(4, request(gpus=8))
    planner = Planner.of(Snapshot(nodes=nodes(2), holdings=held, candidates=(first, lesser)), Policy())
    assert [promise.attempt_id for promise in planner.plan(NOW).promises] == ["att-4"]
    planner.add(candidate(5, request(gpus=7), queue="night", priority=1))
    fresh = Planner.of(planner.snapshot(), planner.policy).plan(NOW + 1)
    result = planner.plan(NOW + 1)
    assert [promise.attempt_id for promise in fresh.starts] == ["att-5"]
    assert (result.starts, result.promises) == (fresh.starts, fresh.promises)


def test_clock_set_back_defers_candidates_again() -> None:
    full = holding(1, {"node-01": ALL_GPUS})
    early = candidate(2, request(gpus=8), not_before=NOW)
    planner = Planner.of(Snapshot(nodes=nodes(1), holdings=(full,), candidates=(early,)), Policy())
    planner.plan(NOW + 1)
    planner.release(full.attempt_id, NOW + 1)
    assert planner.plan(NOW - 60).starts == ()
    assert [start.attempt_id for start in planner.plan(NOW).starts] == ["att-2"]
    assert planner.plan(NOW - 60).starts == ()
    planner.undo("att-2")
    assert planner.plan(NOW - 60).starts == ()
    assert [start.attempt_id for start in planner.plan(NOW).starts] == ["att-2"]
