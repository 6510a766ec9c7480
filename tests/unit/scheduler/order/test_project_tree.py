"""Quotas, limits and borrowing, with the arithmetic small enough to follow by hand."""

from __future__ import annotations

import pytest

from shoal.errors import Bug
from shoal.model.attempt import NodeTask
from shoal.model.people import DeviceAmounts
from shoal.scheduler.facts.amounts import DeviceAmount, ProjectInfo, demand_of, held_devices, minimum_devices
from shoal.scheduler.order.project_tree import DeviceKind, ProjectTree
from tests.support.clusters import request


def gpus(count: int) -> DeviceAmount:
    return DeviceAmount(count * 1000, 0)


def view(name: str, parent: str | None = None, **bounds: int) -> ProjectInfo:
    amounts = {key: DeviceAmounts(gpus=count) for key, count in bounds.items()}
    return ProjectInfo(name=name, parent=parent, **amounts)  # type: ignore[arg-type]


def lab(**vision: int) -> ProjectTree:
    """`research` with a limit of 16 over `vision` and `speech`; `sales` beside it."""
    return ProjectTree(
        [
            view("vision", "research", **({"quota": 4} | vision)),
            view("speech", "research", quota=8),
            view("research", limit=16),
            view("sales", quota=8),
        ]
    )


def test_projects_without_settings_are_never_refused() -> None:
    tree = ProjectTree()
    tree.take("anybody", DeviceAmount(10**9, 10**9))
    assert tree.refusal("anybody", DeviceAmount(10**9, 10**9)) is None
    assert not tree.is_within_quota("anybody", gpus(1))


def test_above_its_quota_a_project_borrows_what_is_idle_up_to_its_parents_limit() -> None:
    tree = lab()
    tree.take("vision", gpus(15))
    assert tree.refusal("vision", gpus(1)) is None
    refused = tree.refusal("vision", gpus(2))
    assert refused is not None
    assert (refused.by, refused.device, refused.in_use, refused.allowed) == (
        "research",
        DeviceKind.GPUS,
        15_000,
        16_000,
    )
    assert refused.is_by_limit


def test_a_project_borrows_no_more_than_it_may() -> None:
    tree = lab(borrow=2)
    tree.take("vision", gpus(4))
    assert tree.refusal("vision", gpus(2)) is None
    refused = tree.refusal("vision", gpus(3))
    assert refused is not None
    assert (refused.by, refused.allowed, refused.is_by_limit) == ("vision", 6000, False)


def test_a_limit_below_quota_and_borrowing_is_the_one_that_refuses() -> None:
    refused = lab(borrow=8, limit=6).refusal("vision", gpus(7))
    assert refused is not None
    assert (refused.allowed, refused.is_by_limit) == (6000, True)


def test_holdings_of_siblings_count_against_their_parents_limit() -> None:
    tree = lab()
    tree.take("speech", gpus(10))
    tree.take("research", gpus(2))
    assert tree.refusal("vision", gpus(4)) is None
    assert tree.refusal("vision", gpus(5)) is not None
    assert tree.refusal("sales", gpus(500)) is None


def test_a_device_that_is_not_asked_for_refuses_nothing() -> None:
    tree = ProjectTree([ProjectInfo(name="a", limit=DeviceAmounts(gpus=1, cpus=2.0))])
    tree.take("a", DeviceAmount(5_000, 1000))
    assert tree.refusal("a", DeviceAmount(0, 1000)) is None
    refused = tree.refusal("a", DeviceAmount(0, 1001))
    assert refused is not None
    assert (refused.device, refused.in_use, refused.allowed) == (DeviceKind.CPUS, 1000, 2000)


def test_a_borrowing_bound_ignores_devices_that_the_quota_does_not_name() -> None:
    tree = ProjectTree(
        [ProjectInfo(name="a", quota=DeviceAmounts(gpus=4), borrow=DeviceAmounts(gpus=0, cpus=0.0))]
    )
    assert tree.refusal("a", DeviceAmount(4_000, 10**6)) is None
    assert tree.refusal("a", DeviceAmount(5_000, 0)) is not None


def test_within_quota_counts_the_own_quota_or_a_parents_quota() -> None:
    tree = ProjectTree(
        [view("research", quota=8), view("vision", "research", quota=2), view("old", "research")]
    )
    assert tree.is_within_quota("old", gpus(8))
    assert not tree.is_within_quota("old", gpus(9))
    tree.take("old", gpus(8))
    assert tree.is_within_quota("vision", gpus(2)), "its own quota is its own, whatever its siblings hold"
    assert not tree.is_within_quota("vision", gpus(3))


def test_a_quota_of_gpus_covers_their_cpus_but_no_job_without_gpus() -> None:
    tree = lab()
    assert tree.is_within_quota("vision", DeviceAmount(4_000, 10**6))
    assert not tree.is_within_quota("vision", DeviceAmount(0, 1000))
    both = ProjectTree([ProjectInfo(name="a", quota=DeviceAmounts(gpus=4, cpus=8.0))])
    assert both.is_within_quota("a", DeviceAmount(4_000, 8000))
    assert not both.is_within_quota("a", DeviceAmount(4_000, 8001))
    assert both.is_within_quota("a", DeviceAmount(0, 8000))


def test_borrowed_devices_are_taken_back_for_a_quota_and_for_nothing_else() -> None:
    tree = lab()
    tree.take("vision", gpus(12))
    assert tree.over_quota("vision") == gpus(8)
    assert tree.may_reclaim("speech", gpus(8), "vision")
    assert not tree.may_reclaim("speech", gpus(9), "vision"), "9 are more than the quota of `speech`"
    assert not tree.may_reclaim("vision", gpus(1), "vision")
    tree.give("vision", gpus(8))
    assert not tree.may_reclaim("speech", gpus(8), "vision"), "what is left is within its own quota"


def test_a_quota_above_protects_what_is_below_it_from_outside_alone() -> None:
    tree = ProjectTree(
        [
            view("research", quota=8),
            view("vision", "research"),
            view("speech", "research", quota=4),
            view("sales", quota=8),
        ]
    )
    tree.take("vision", gpus(8))
    assert not tree.may_reclaim("sales", gpus(1), "vision"), "`research` is within its quota"
    assert tree.may_reclaim("speech", gpus(4), "vision"), "inside `research`, `vision` has no quota"
    tree.take("vision", gpus(1))
    assert tree.may_reclaim("sales", gpus(1), "vision")


def test_settings_change_and_holdings_stay() -> None:
    tree = lab()
    tree.take("vision", gpus(4))
    tree.take("stranger", gpus(3))
    before = tree.version
    tree.change([view("vision", "company", limit=4), view("stranger", "company"), view("company")])
    assert tree.version > before
    assert tree.held("company") == gpus(7)
    assert tree.refusal("vision", gpus(1)) is not None
    assert tree.held("research") == gpus(0)


def test_a_cycle_of_projects_is_reported_as_a_bug() -> None:
    with pytest.raises(Bug, match="above itself"):
        ProjectTree([view("a", "b"), view("b", "a")])


def test_a_gang_asks_for_all_its_nodes_and_an_elastic_one_for_its_least() -> None:
    amount = minimum_devices(demand_of(request(nodes=(2, 4), gpus=8, cpus=1.5)))
    assert amount == DeviceAmount(16_000, 3000)
    task = NodeTask(node="n", cpus=1.5, memory_bytes=0, gpu_ids=(0, 3))
    assert held_devices((task, task)) == DeviceAmount(4_000, 3000)


def test_a_part_of_a_gpu_counts_as_that_part() -> None:
    task = NodeTask(node="n", cpus=1.0, memory_bytes=0, gpu_ids=(3,), gpu_milli=250)
    assert held_devices((task, task)) == DeviceAmount(500, 2000)
    tree = ProjectTree([view("a", limit=1)])
    tree.take("a", held_devices((task, task, task)))
    assert tree.refusal("a", DeviceAmount(250, 0)) is None
    assert tree.refusal("a", DeviceAmount(260, 0)) is not None
