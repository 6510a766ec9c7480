"""Which trees of projects are taken, and what a project's ceiling means for a job at submit."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.errors import SpecError
from shoal.model.people import Devices, Project
from tests.support.lab import ANA, Lab, now, waited


def gpus(count: int) -> Devices:
    return Devices(gpus=count)


@pytest.fixture
def lab() -> Lab:
    """`company` > `research` > `vision`, beside the lab's own project."""
    lab = Lab()
    make(lab, "company", limit=gpus(100))
    make(lab, "research", parent="company")
    make(lab, "vision", parent="research", quota=gpus(40), borrow=gpus(20))
    return lab


def make(lab: Lab, name: str, **fields: Any) -> Project:
    return waited(lab.plane.create_project(ANA, name, fields))


def change(lab: Lab, name: str, **fields: Any) -> Project:
    return now(lab.plane.update_project(ANA, name, fields))


def refused(lab: Lab, name: str, **fields: Any) -> SpecError:
    before = lab.read(lambda tx: tx.people.projects())
    act = change if any(project.name == name for project in before) else make
    with pytest.raises(SpecError) as error:
        act(lab, name, **fields)
    assert lab.read(lambda tx: tx.people.projects()) == before
    assert error.value.hint
    return error.value


def test_a_projects_place_and_quotas_are_kept_and_recorded(lab: Lab) -> None:
    vision = lab.read(lambda tx: tx.people.get_project("vision"))
    assert vision is not None
    assert (vision.parent, vision.quota, vision.borrow, vision.weight) == (
        "research",
        gpus(40),
        gpus(20),
        1.0,
    )
    said = lab.events("project.created")[-1].data
    assert said["quota"] == {"gpus": 40, "cpus": None}
    assert change(lab, "vision", quota=None, borrow=None).quota is None


def test_a_parent_that_is_not_there_is_named_with_the_nearest(lab: Lab) -> None:
    error = refused(lab, "speech", parent="reserch")
    assert error.message == "there is no project `reserch` to be part of; did you mean `research`?"


def test_a_project_is_never_part_of_itself(lab: Lab) -> None:
    error = refused(lab, "company", parent="vision")
    circle = "`company` is part of `vision` is part of `research` is part of `company`"
    assert error.message == f"a project cannot be part of itself: {circle}"
    assert "part of itself" in refused(lab, "lab", parent="lab").message


def test_the_quotas_of_children_fit_below_every_limit_above_them(lab: Lab) -> None:
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


def test_what_a_parent_may_borrow_counts_for_what_its_children_are_promised(lab: Lab) -> None:
    make(lab, "part", parent="vision", quota=gpus(60))
    refused(lab, "part", quota=gpus(61))


def test_a_quota_is_not_above_the_projects_own_limit(lab: Lab) -> None:
    error = refused(lab, "vision", limit=gpus(39))
    assert error.message == "project `vision`: a quota of 40 GPUs is above its limit of 39 GPUs"
    cpus = refused(lab, "lab", quota=Devices(cpus=8.5), limit=Devices(cpus=8.0))
    assert "8.5 CPUs is above its limit of 8 CPUs" in cpus.message


def test_borrowing_is_above_a_quota_and_needs_one(lab: Lab) -> None:
    assert refused(lab, "lab", borrow=gpus(4)).message == "project `lab` has no quota of GPUs to borrow above"
    assert refused(lab, "lab", borrow=gpus(0)).message == "project `lab` has no quota to borrow above"
    refused(lab, "vision", quota=None)
    assert change(lab, "vision", borrow=Devices(gpus=0, cpus=0.0)).borrow is not None


def test_a_tree_has_few_levels(lab: Lab) -> None:
    for above, name in zip("abcde", "bcdef", strict=True):
        if above == "a":
            make(lab, "a", parent="vision")
        if name != "f":
            make(lab, name, parent=above)
    assert "more than 8 levels" in refused(lab, "f", parent="e").message
    make(lab, "top")
    assert "more than 8 levels" in refused(lab, "company", parent="top").message


def test_a_job_that_its_project_can_never_hold_is_refused_at_submit() -> None:
    lab = Lab()
    make(lab, "top", limit=Devices(cpus=3.0))
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


def test_limit_lowered_while_a_plan_is_written_down_is_kept() -> None:
    lab = Lab()
    lab.heal()
    lab.place()
    job = lab.submit(resources={"cpus": 4})
    lab.store.meanwhile("before write", lambda: change(lab, "lab", limit=Devices(cpus=3.0)))
    lab.place()
    lab.place()
    assert lab.status(job) == "queued"


def test_limit_that_somebody_set_without_hearing_of_it_is_kept() -> None:
    """As when the caller is gone, or the database right after its commit."""
    lab = Lab()
    lab.heal()
    lab.place()
    job = lab.submit(resources={"cpus": 4})

    def leave() -> None:
        raise ConnectionError

    lab.store.meanwhile("after write", leave)
    with pytest.raises(ConnectionError):
        change(lab, "lab", limit=Devices(cpus=3.0))
    lab.place()
    assert lab.status(job) == "queued"
