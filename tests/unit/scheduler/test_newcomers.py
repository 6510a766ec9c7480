"""Newcomers that are looked at alone start as they would if everybody were looked at."""

from __future__ import annotations

from shoal.scheduler import Planner, Policy, Snapshot
from tests.support.clusters import NOW, holding, job, nodes, request


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
