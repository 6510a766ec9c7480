"""Which trees of projects are accepted, and what a project's ceiling means for a job at submit."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.errors import SpecError
from shoal.model.people import DeviceAmounts, Project
from tests.support.planes.bench import ANA, ControlPlaneLab, result_in_loop, result_of


def gpus(count: int) -> DeviceAmounts:
    return DeviceAmounts(gpus=count)


@pytest.fixture
def lab() -> ControlPlaneLab:
    """`company` > `research` > `vision`, beside the lab's own project."""
    lab = ControlPlaneLab()
    make(lab, "company", limit=gpus(100))
    make(lab, "research", parent="company")
    make(lab, "vision", parent="research", quota=gpus(40), borrow=gpus(20))
    return lab


def make(lab: ControlPlaneLab, name: str, **fields: Any) -> Project:
    return result_in_loop(lab.plane.create_project(ANA, name, fields))


def change(lab: ControlPlaneLab, name: str, **fields: Any) -> Project:
    return result_of(lab.plane.update_project(ANA, name, fields))


def refused(lab: ControlPlaneLab, name: str, **fields: Any) -> SpecError:
    before = lab.read(lambda tx: tx.people.projects())
    act = change if any(project.name == name for project in before) else make
    with pytest.raises(SpecError) as error:
        act(lab, name, **fields)
    assert lab.read(lambda tx: tx.people.projects()) == before
    assert error.value.hint
    return error.value


def test_a_projects_place_and_quotas_are_kept_and_recorded(lab: ControlPlaneLab) -> None:
    vision = lab.read(lambda tx: tx.people.get_project("vision"))
    assert vision is not None
    assert (vision.parent, vision.quota, vision.borrow, vision.weight) == (
        "research",
        gpus(40),
        gpus(20),
        1.0,
    )
    data = lab.events("project.created")[-1].data
    assert data["quota"] == {"gpus": 40, "cpus": None}
    assert change(lab, "vision", quota=None, borrow=None).quota is None


def test_missing_parent_project_is_named_with_the_nearest(lab: ControlPlaneLab) -> None:
    error = refused(lab, "speech", parent="reserch")
    assert error.message == "there is no project `reserch` to be part of; did you mean `research`?"


def test_a_project_is_never_part_of_itself(lab: ControlPlaneLab) -> None:
    error = refused(lab, "company", parent="vision")
    circle = "`company` is part of `vision` is part of `research` is part of `company`"
    assert error.message == f"a project cannot be part of itself: {circle}"
    assert "part of itself" in refused(lab, "lab", parent="lab").message


def test_the_quotas_of_children_fit_below_every_limit_above_them(lab: ControlPlaneLab) -> None:
    make(lab, "speech", parent="research", quota=gpus(60))
    error = refused(lab, "audio", parent="company", quota=gpus(1))
    assert error.message == (
        "the projects in `company` would have quotas of 101 GPUs together; "
        "`company` may have at most 100 GPUs"
    )
    assert error.hint is not None
    assert error.hint.endswith("`shoal project update company --limit 101`")
    refused(lab, "company", limit=gpus(99))
    refused(lab, "research", limit=gpus(99))
    change(lab, "company", limit=None)
    make(lab, "audio", parent="company", quota=gpus(1))


def test_borrowing_of_a_parent_counts_for_the_quotas_of_its_children(lab: ControlPlaneLab) -> None:
    make(lab, "part", parent="vision", quota=gpus(60))
    refused(lab, "part", quota=gpus(61))


def test_a_quota_is_not_above_the_projects_own_limit(lab: ControlPlaneLab) -> None:
    error = refused(lab, "vision", limit=gpus(39))
    assert error.message == "project `vision`: a quota of 40 GPUs is above its limit of 39 GPUs"
    cpus = refused(lab, "lab", quota=DeviceAmounts(cpus=8.5), limit=DeviceAmounts(cpus=8.0))
    assert "8.5 CPUs is above its limit of 8 CPUs" in cpus.message


def test_borrowing_is_above_a_quota_and_needs_one(lab: ControlPlaneLab) -> None:
    assert refused(lab, "lab", borrow=gpus(4)).message == "project `lab` has no quota of GPUs to borrow above"
    assert refused(lab, "lab", borrow=gpus(0)).message == "project `lab` has no quota to borrow above"
    refused(lab, "vision", quota=None)
    assert change(lab, "vision", borrow=DeviceAmounts(gpus=0, cpus=0.0)).borrow is not None


def test_a_tree_has_few_levels(lab: ControlPlaneLab) -> None:
    for above, name in zip("abcde", "bcdef", strict=True):
        if above == "a":
            make(lab, "a", parent="vision")
        if name != "f":
            make(lab, name, parent=above)
    assert "more than 8 levels" in refused(lab, "f", parent="e").message
    make(lab, "top")
    assert "more than 8 levels" in refused(lab, "company", parent="top").message


def test_a_job_that_its_project_can_never_hold_is_refused_at_submit() -> None:
    lab = ControlPlaneLab()
    make(lab, "top", limit=DeviceAmounts(cpus=3.0))
    change(lab, "lab", parent="top")
    with pytest.raises(SpecError) as error:
        lab.submit(name="big", resources={"cpus": 4})
    assert error.value.message == (
        "job `big` needs 4 CPUs; project `top`, which `lab` is part of, may have at most 3, its limit"
    )
    assert error.value.facts == {
        "project": "top",
        "device": "cpus",
        "asked": 4.0,
        "in_use": 0.0,
        "limit": 3.0,
        "quota": None,
        "borrow": None,
    }
    assert lab.submit(resources={"cpus": 3}).project == "lab"


def test_limit_lowered_while_a_plan_is_recorded_is_kept() -> None:
    lab = ControlPlaneLab()
    lab.heal()
    lab.place()
    job = lab.submit(resources={"cpus": 4})
    lab.store.meanwhile("before write", lambda: change(lab, "lab", limit=DeviceAmounts(cpus=3.0)))
    lab.place()
    lab.place()
    assert lab.status(job) == "queued"


def test_limit_set_without_a_reply_is_kept() -> None:
    """As when the caller, or the database right after its commit, is gone."""
    lab = ControlPlaneLab()
    lab.heal()
    lab.place()
    job = lab.submit(resources={"cpus": 4})

    def leave() -> None:
        raise ConnectionError

    lab.store.meanwhile("after write", leave)
    with pytest.raises(ConnectionError):
        change(lab, "lab", limit=DeviceAmounts(cpus=3.0))
    lab.place()
    assert lab.status(job) == "queued"
