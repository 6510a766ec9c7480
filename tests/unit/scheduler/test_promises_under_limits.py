"""A promise, or freed capacity, counts on what its project may hold: limits as well as nodes."""

from __future__ import annotations

from shoal.model.people import DeviceAmounts
from shoal.scheduler import Candidate, Holding, Planner, Policy, Snapshot
from shoal.scheduler.facts.amounts import ProjectInfo
from tests.support.clusters import NOW, candidate, holding, nodes, request

TOP = ProjectInfo(name="top", limit=DeviceAmounts(gpus=9))
BELOW = ProjectInfo(name="vision", parent="top")


def planner_of(count: int, held: tuple[Holding, ...], *waiting: Candidate, **fields: object) -> Planner:
    snapshot = Snapshot(nodes=nodes(count), holdings=held, candidates=waiting, **fields)  # type: ignore[arg-type]
    return Planner.of(snapshot, Policy(patience_s=0.0))


def test_no_job_uses_the_limit_left_to_a_job_that_others_stop_for() -> None:
    """Otherwise it would be asked to stop right after its start."""
    held = (holding(1, {"node-01": (0,)}),)
    urgent, small = candidate(2, request(gpus=8), priority=50), candidate(3, request(gpus=2))
    planner = planner_of(2, held, urgent, small, projects=(TOP, BELOW))
    # No job may evict the holder of the other node.
    planner.hold(holding(4, {"node-02": (0,)}, priority=80))
    result = planner.plan(NOW)
    assert [eviction.attempt_id for eviction in result.evictions] == ["held-1"]
    assert result.starts == ()


def test_promise_moves_to_another_job_when_its_project_fills_its_limit() -> None:
    limited = ProjectInfo(name="vision", limit=DeviceAmounts(gpus=9))
    held = (holding(1, {"node-01": (0,)}, project="speech", time_limit_s=9000.0),)
    wide = candidate(2, request(gpus=8, nodes=1, time_limit_s=600.0))
    planner = planner_of(1, held, wide, projects=(limited,))
    assert [eviction.attempt_id for eviction in planner.plan(NOW).promises] == [wide.attempt_id]
    planner.add(candidate(3, request(gpus=2, time_limit_s=600.0)))
    assert len(planner.plan(NOW + 1).starts) == 1
    planner.add(candidate(4, request(gpus=1)))
    fresh = Planner.of(planner.snapshot(), planner.policy).plan(NOW + 2)
    result = planner.plan(NOW + 2)
    assert (result.starts, result.promises) == (fresh.starts, fresh.promises)
