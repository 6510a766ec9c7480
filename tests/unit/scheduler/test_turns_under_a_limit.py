"""One who is due and waits for its own project's limit is not passed for ever by smaller ones of it."""

from __future__ import annotations

from shoal.model.people import Devices
from shoal.scheduler import Planner, Policy, Why
from shoal.scheduler.devices import ProjectView
from tests.support.clusters import NOW, holding, job, nodes, request


def limited(**bounds: int) -> Planner:
    """A project `vision` with three GPUs in use, on nodes that have far more than it may have."""
    planner = Planner(Policy())
    for node in nodes(2, gpus=8):
        planner.set_node(node)
    told = {name: Devices(gpus=count) for name, count in bounds.items()}
    planner.set_projects([ProjectView(name="vision", **told)])  # type: ignore[arg-type]
    for number in range(3):
        planner.hold(holding(number, {"node-01": (number,)}))
    return planner


def test_what_is_given_back_is_kept_for_the_one_who_is_due() -> None:
    planner = limited(limit=4)
    planner.add(job(1, request(gpus=4), due_at=NOW - 1))
    planner.add(job(2, request(gpus=1), due_at=NOW + 3600))
    assert planner.plan(NOW).starts == ()
    told = planner.explain("att-2", NOW)
    assert told is not None
    assert told.why is Why.LIMIT
    assert "holds 3 of its limit of 4, and keeps 4 for a job that is due" in told.sentence
    for number in range(3):
        planner.release(f"held-{number}", NOW)
    assert [start.attempt_id for start in planner.plan(NOW + 1).starts] == ["att-1"]


def test_newcomers_are_told_the_same() -> None:
    planner = limited(limit=4)
    planner.add(job(1, request(gpus=4), due_at=NOW - 1))
    planner.plan(NOW)
    planner.add(job(2, request(gpus=1), due_at=NOW + 3600))
    assert planner.plan(NOW + 1).starts == ()


def test_quota_that_is_also_the_limit_keeps_the_turn_too() -> None:
    planner = limited(limit=4, quota=4)
    planner.add(job(1, request(gpus=4), due_at=NOW - 1))
    planner.add(job(2, request(gpus=1), due_at=NOW + 3600))
    assert planner.plan(NOW).starts == ()


def test_nothing_is_kept_for_one_who_is_not_due_or_could_never_have_it() -> None:
    for ask, due_at in ((4, NOW + 10), (5, NOW - 1)):
        planner = limited(limit=4)
        planner.add(job(1, request(gpus=ask), due_at=due_at))
        planner.add(job(2, request(gpus=1), due_at=NOW + 3600))
        assert [start.attempt_id for start in planner.plan(NOW).starts] == ["att-2"]


def crowded() -> Planner:
    """As `limited`, where one who comes first waits for room, and a due one for the limit of `vision`."""
    planner = limited(limit=4)
    planner.hold(holding(9, {"node-02": (0,)}, project="speech"))
    planner.add(job(9, request(gpus=8), project="speech", priority=9))
    planner.add(job(5, request(gpus=4), due_at=NOW - 1))
    assert planner.plan(NOW).starts == ()
    return planner


def test_newcomer_of_higher_priority_is_kept_from_nothing() -> None:
    planner = crowded()
    planner.add(job(6, request(gpus=1), priority=5))
    assert [start.attempt_id for start in planner.plan(NOW + 1).starts] == ["att-6"]


def test_newcomer_that_came_before_the_one_who_is_due_goes_first() -> None:
    planner = crowded()
    planner.add(job(4, request(gpus=1), submitted_at=NOW - 90.0, due_at=NOW - 1))
    assert [start.attempt_id for start in planner.plan(NOW + 1).starts] == ["att-4"]
