"""A due job that waits for its own project's limit is not passed for ever by smaller jobs of the project."""

from __future__ import annotations

from shoal.model.people import DeviceAmounts
from shoal.scheduler import Planner, Policy, WaitReason
from shoal.scheduler.facts.amounts import ProjectInfo
from tests.support.clusters import NOW, candidate, holding, nodes, request


def limited(**bounds: int) -> Planner:
    """A project `vision` with three GPUs in use, on nodes that have far more than it may have."""
    planner = Planner(Policy())
    for node in nodes(2, gpus=8):
        planner.set_node(node)
    amounts = {name: DeviceAmounts(gpus=count) for name, count in bounds.items()}
    planner.set_projects([ProjectInfo(name="vision", **amounts)])  # type: ignore[arg-type]
    for number in range(3):
        planner.hold(holding(number, {"node-01": (number,)}))
    return planner


def test_released_quota_is_reserved_for_the_due_job() -> None:
    planner = limited(limit=4)
    planner.add(candidate(1, request(gpus=4), due_at=NOW - 1))
    planner.add(candidate(2, request(gpus=1), due_at=NOW + 3600))
    assert planner.plan(NOW).starts == ()
    explanation = planner.explain("att-2", NOW)
    assert explanation is not None
    assert explanation.why is WaitReason.LIMIT
    assert "holds 3 of its limit of 4, and keeps 4 for a job that is due" in explanation.sentence
    for number in range(3):
        planner.release(f"held-{number}", NOW)
    assert [start.attempt_id for start in planner.plan(NOW + 1).starts] == ["att-1"]


def test_newcomers_respect_quota_reserved_for_the_due_job() -> None:
    planner = limited(limit=4)
    planner.add(candidate(1, request(gpus=4), due_at=NOW - 1))
    planner.plan(NOW)
    planner.add(candidate(2, request(gpus=1), due_at=NOW + 3600))
    assert planner.plan(NOW + 1).starts == ()


def test_quota_that_is_also_the_limit_is_reserved_for_the_due_job() -> None:
    planner = limited(limit=4, quota=4)
    planner.add(candidate(1, request(gpus=4), due_at=NOW - 1))
    planner.add(candidate(2, request(gpus=1), due_at=NOW + 3600))
    assert planner.plan(NOW).starts == ()


def test_no_quota_is_reserved_for_a_job_that_is_not_due_or_exceeds_the_limit() -> None:
    for ask, due_at in ((4, NOW + 10), (5, NOW - 1)):
        planner = limited(limit=4)
        planner.add(candidate(1, request(gpus=ask), due_at=due_at))
        planner.add(candidate(2, request(gpus=1), due_at=NOW + 3600))
        assert [start.attempt_id for start in planner.plan(NOW).starts] == ["att-2"]


def crowded() -> Planner:
    """Like `limited`. One job of higher priority waits for nodes, and a due job waits for the limit of
    `vision`.
    """
    planner = limited(limit=4)
    planner.hold(holding(9, {"node-02": (0,)}, project="speech"))
    planner.add(candidate(9, request(gpus=8), project="speech", priority=9))
    planner.add(candidate(5, request(gpus=4), due_at=NOW - 1))
    assert planner.plan(NOW).starts == ()
    return planner


def test_newcomer_of_higher_priority_ignores_reserved_quota() -> None:
    planner = crowded()
    planner.add(candidate(6, request(gpus=1), priority=5))
    assert [start.attempt_id for start in planner.plan(NOW + 1).starts] == ["att-6"]


def test_newcomer_submitted_before_the_due_job_starts_first() -> None:
    planner = crowded()
    planner.add(candidate(4, request(gpus=1), submitted_at=NOW - 90.0, due_at=NOW - 1))
    assert [start.attempt_id for start in planner.plan(NOW + 1).starts] == ["att-4"]
