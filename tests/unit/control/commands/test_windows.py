"""Maintenance and reservations as operators declare them, and what the loops do about them."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.control.commands.windows import WindowRequest, jobs_in_the_way
from shoal.errors import NotFound, ShoalError, SpecError, StateError
from shoal.model.node import Window, WindowKind
from shoal.model.people import Project
from shoal.scheduler import Explanation, WaitReason
from tests.support.planes.bench import ANA, ControlPlaneLab, result_of

HOUR = 3600.0


@pytest.fixture
def lab() -> ControlPlaneLab:
    lab = ControlPlaneLab()
    lab.heal()
    result_of(
        lab.store.write(lambda tx: tx.people.add_project(Project(name="vision", uid=tx.people.next_uid())))
    )
    return lab


def window_request(**fields: Any) -> WindowRequest:
    defaults: dict[str, Any] = {"kind": WindowKind.MAINTENANCE, "nodes": ("n1",), "duration_s": HOUR}
    return WindowRequest(**{**defaults, **fields})


def declare(lab: ControlPlaneLab, **fields: Any) -> Window:
    return result_of(lab.plane.declare_window(ANA, window_request(**fields)))


def wait_reason(lab: ControlPlaneLab, job: Any) -> Explanation:
    explanation = lab.core.planning.planner.explain(lab.attempt(job).attempt_id, lab.clock.now())
    assert explanation is not None
    return explanation


def test_node_in_maintenance_takes_work_again_when_it_is_over(lab: ControlPlaneLab) -> None:
    declare(lab, nodes=("n1", "n2"))
    job = lab.submit()
    left_s = lab.place()
    assert lab.status(job) == "queued"
    assert wait_reason(lab, job).why is WaitReason.WINDOW
    assert left_s == pytest.approx(HOUR, abs=1.0)
    lab.clock.advance(HOUR)
    lab.place()
    assert lab.status(job) == "starting"


def test_job_without_a_limit_stays_off_a_node_from_when_maintenance_is_declared(lab: ControlPlaneLab) -> None:
    declare(lab, from_at=lab.clock.now() + 2 * HOUR)
    endless, short = lab.submit(resources={"cpus": 8}), lab.submit(resources={"cpus": 8}, time_limit="1h")
    lab.place()
    assert lab.attempt(endless).node_names == ("n2",)
    assert lab.attempt(short).node_names == ("n1",)


def test_restarted_control_plane_knows_the_declared_windows(lab: ControlPlaneLab) -> None:
    window = declare(lab, nodes=("n1", "n2"))
    lab.restart()
    job = lab.submit()
    lab.run_loops()
    assert lab.status(job) == "queued"
    result_of(lab.plane.cancel_window(ANA, window.window_id))
    lab.place()
    assert lab.status(job) == "starting"
    assert [event.kind for event in lab.events("window.")] == ["window.added", "window.cancelled"]


def test_reservation_takes_the_jobs_of_its_project(lab: ControlPlaneLab) -> None:
    declare(lab, nodes=("n1", "n2"), kind=WindowKind.RESERVATION, project="lab")
    job = lab.submit()
    lab.place()
    assert lab.status(job) == "starting"


def test_window_by_count_takes_the_nodes_with_the_fewest_jobs_in_the_way(lab: ControlPlaneLab) -> None:
    busy = lab.running_job()
    [name] = lab.attempt(busy).node_names
    window = declare(lab, nodes=(), count=1, pool="default")
    assert window.nodes == ({"n1": "n2", "n2": "n1"}[name],)
    other = declare(lab, nodes=(), count=1)
    assert other.nodes == (name,)
    holding = lab.read(lambda tx: tx.attempts.holding())
    (there,) = jobs_in_the_way([other], holding, (), lab.clock.now())
    assert [job.job_id for job, _ in there] == [busy.job_id]


def test_jobs_below_the_project_of_a_reservation_are_not_in_its_way(lab: ControlPlaneLab) -> None:
    job = lab.running_job()

    def in_the_way() -> list[str]:
        holding, projects = lab.read(lambda tx: (tx.attempts.holding(), tx.people.projects()))
        (there,) = jobs_in_the_way([window], holding, projects, lab.clock.now())
        return [job.job_id for job, _ in there]

    window = declare(lab, nodes=("n1", "n2"), kind=WindowKind.RESERVATION, project="vision")
    assert in_the_way() == [job.job_id]
    result_of(lab.plane.update_project(ANA, "lab", {"parent": "vision"}))
    assert in_the_way() == []


def test_window_that_overlaps_another_on_the_same_node_is_refused(lab: ControlPlaneLab) -> None:
    first = declare(lab, from_at=lab.clock.now() + HOUR)
    with pytest.raises(StateError, match="n1 has a maintenance then already") as caught:
        declare(lab, from_at=lab.clock.now() + 1.5 * HOUR)
    assert first.window_id in str(caught.value.hint)
    declare(lab, from_at=first.until_at)
    declare(lab, nodes=("n2",), from_at=first.from_at)


def test_window_declared_twice_with_one_key_is_one(lab: ControlPlaneLab) -> None:
    first, second = (result_of(lab.plane.declare_window(ANA, window_request(), key="k")) for _ in range(2))
    assert first == second
    assert lab.read(lambda tx: tx.windows.open(lab.clock.now())) == [first]


def test_windows_that_are_over_are_forgotten(lab: ControlPlaneLab) -> None:
    first = declare(lab)
    lab.clock.advance(HOUR)
    second = declare(lab)
    assert lab.read(lambda tx: tx.windows.get(first.window_id)) is None
    assert lab.read(lambda tx: tx.windows.open(lab.clock.now())) == [second]


@pytest.mark.parametrize(
    ("fields", "kind", "sentence"),
    [
        ({"nodes": ()}, SpecError, "say which nodes, or how many"),
        ({"count": 1}, SpecError, "say which nodes, or how many"),
        ({"pool": "default"}, SpecError, "of no pool"),
        ({"project": "vision"}, SpecError, "maintenance is for no project"),
        ({"kind": WindowKind.RESERVATION}, SpecError, "a reservation is for a project"),
        ({"kind": WindowKind.RESERVATION, "project": "visoin"}, NotFound, "did you mean `vision`"),
        ({"nodes": ("n11",)}, NotFound, "no node `n11`; did you mean `n1`"),
        ({"nodes": (), "count": 3}, StateError, "3 nodes are asked for; 2 take work"),
        ({"nodes": (), "count": 1, "pool": "b200"}, NotFound, "no pool `b200`; there is default"),
        ({"from_at": 0.0}, SpecError, "over already"),
        ({"from_at": 1e11}, SpecError, "more than a year ahead"),
    ],
)
def test_impossible_window_is_refused(
    lab: ControlPlaneLab, fields: dict[str, Any], kind: type[ShoalError], sentence: str
) -> None:
    with pytest.raises(kind, match=sentence) as caught:
        declare(lab, **fields)
    assert caught.value.hint
    assert lab.events("window.") == []


def test_window_declared_while_a_plan_is_recorded_keeps_its_nodes(lab: ControlPlaneLab) -> None:
    job = lab.submit()
    lab.store.meanwhile("before write", lambda: declare(lab, nodes=("n1", "n2")))
    lab.place()
    assert lab.status(job) == "queued"
    lab.place()
    assert wait_reason(lab, job).why is WaitReason.WINDOW
