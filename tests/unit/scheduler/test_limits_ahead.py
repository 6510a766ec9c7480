"""What is promised, or made room for, counts on what its project may hold: limits as well as nodes."""

from __future__ import annotations

from shoal.model.people import Devices
from shoal.scheduler import Candidate, Holding, Planner, Policy, Snapshot
from shoal.scheduler.devices import ProjectView
from tests.support.clusters import NOW, holding, job, nodes, request

TOP = ProjectView(name="top", limit=Devices(gpus=9))
BELOW = ProjectView(name="vision", parent="top")


def planner_of(count: int, held: tuple[Holding, ...], *waiting: Candidate, **fields: object) -> Planner:
    snapshot = Snapshot(nodes=nodes(count), holdings=held, candidates=waiting, **fields)  # type: ignore[arg-type]
    return Planner.of(snapshot, Policy(patience_s=0.0))


def test_nobody_starts_on_what_a_limit_leaves_to_a_job_that_others_stop_for() -> None:
    """Else it would be asked to stop right after."""
    held = (holding(1, {"node-01": (0,)}),)
    urgent, small = job(2, request(gpus=8), priority=50), job(3, request(gpus=2))
    planner = planner_of(2, held, urgent, small, projects=(TOP, BELOW))
    # Nobody may have the other node emptied.
    planner.hold(holding(4, {"node-02": (0,)}, priority=80))
    made = planner.plan(NOW)
    assert [one.attempt_id for one in made.evictions] == ["held-1"]
    assert made.starts == ()


def test_promise_whose_project_fills_its_limit_meanwhile_goes_to_another() -> None:
    limited = ProjectView(name="vision", limit=Devices(gpus=9))
    held = (holding(1, {"node-01": (0,)}, project="speech", time_limit_s=9000.0),)
    wide = job(2, request(gpus=8, nodes=1, time_limit_s=600.0))
    planner = planner_of(1, held, wide, projects=(limited,))
    assert [one.attempt_id for one in planner.plan(NOW).promises] == [wide.attempt_id]
    planner.add(job(3, request(gpus=2, time_limit_s=600.0)))
    assert len(planner.plan(NOW + 1).starts) == 1
    planner.add(job(4, request(gpus=1)))
    again = Planner.of(planner.snapshot(), planner.policy).plan(NOW + 2)
    made = planner.plan(NOW + 2)
    assert (made.starts, made.promises) == (again.starts, again.promises)
