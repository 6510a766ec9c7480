"""Another node takes over a lost task before any waiting job starts, under the rules for every start."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.model.attempt import NodeTask
from shoal.model.job import GpuRequest, ResourceRequest, TopologyRequest
from shoal.model.node import Window, WindowKind
from shoal.model.people import DeviceAmounts
from shoal.scheduler import (
    Candidate,
    GpuInfo,
    Holding,
    NodeInfo,
    Plan,
    PlannedReplacement,
    Planner,
    Policy,
    TaskLoss,
    WaitReason,
)
from shoal.scheduler.facts.amounts import ProjectInfo
from shoal.scheduler.order.fair_share import Usage

GPUS = (GpuInfo(0, "H100"), GpuInfo(1, "H100"))
NOW = 1000.0


def node(name: str, **fields: Any) -> NodeInfo:
    return NodeInfo(name=name, **{"cpus": 8.0, "memory_bytes": 64, "gpus": GPUS, **fields})


def lost_node(name: str, **fields: Any) -> NodeInfo:
    return node(name, closed_because="declared dead by ana", **fields)


def request(nodes: int = 1, **fields: Any) -> ResourceRequest:
    return ResourceRequest(min_nodes=nodes, max_nodes=nodes, cpus=1.0, gpus=GpuRequest(count=2), **fields)


def gang(name: str, nodes: tuple[str, ...], *, placed_at: float = 0.0, **fields: Any) -> Holding:
    wanted = fields.pop("request", request(len(nodes)))
    tasks = tuple(
        NodeTask(node=name, cpus=1.0, memory_bytes=64, disk_bytes=0, gpu_ids=(0, 1)) for name in nodes
    )
    return Holding(
        attempt_id=name,
        job_id=f"job of {name}",
        placed_at=placed_at,
        request=wanted,
        time_limit_s=wanted.time_limit_s,
        **{"project": "vision", "priority": 0, "allocation": tasks, **fields},
    )


def waiting(name: str, **fields: Any) -> Candidate:
    fields = {"request": request(), "project": "vision", **fields}
    return Candidate(attempt_id=name, job_id=name, order=1, submitted_at=1.0, **fields)


def planner_of(nodes: list[NodeInfo], holdings: list[Holding], **policy: Any) -> Planner:
    planner = Planner(Policy(**policy))
    for view in nodes:
        planner.set_node(view)
    for holding in holdings:
        planner.hold(holding)
    return planner


def plan_losses(planner: Planner, *losses: tuple[str, str], now: float = NOW) -> Plan:
    planner.set_losses(TaskLoss(attempt_id=attempt_id, node=name) for attempt_id, name in losses)
    return planner.plan(now)


def moves(plan: Plan) -> list[tuple[str, str | None]]:
    return [
        (planned.attempt_id, planned.task.node if planned.task else None) for planned in plan.replacements
    ]


def test_lost_task_goes_before_a_waiting_job_of_any_priority() -> None:
    planner = planner_of([node("n1"), lost_node("n2"), node("n3")], [gang("a", ("n1", "n2"))])
    planner.add(waiting("urgent", priority=80))
    plan = plan_losses(planner, ("a", "n2"))
    assert (moves(plan), plan.starts) == ([("a", "n3")], ())


def test_other_jobs_start_in_the_same_plan_on_what_is_left() -> None:
    nodes = [node("n1"), lost_node("n2"), node("n3"), node("n4")]
    planner = planner_of(nodes, [gang("a", ("n1", "n2"))])
    planner.add(waiting("b"))
    plan = plan_losses(planner, ("a", "n2"))
    placed = [task.node for start in plan.starts for task in start.allocation]
    assert (moves(plan), placed) == ([("a", "n3")], ["n4"])


def test_replacement_keeps_the_place_of_the_lost_task_among_the_ranks() -> None:
    planner = planner_of([lost_node("n1"), node("n2"), node("n3")], [gang("a", ("n1", "n2"))])
    plan_losses(planner, ("a", "n1"))
    (holding,) = planner.snapshot().holdings
    assert [task.node for task in holding.allocation] == ["n3", "n2"]


def test_last_free_node_goes_to_the_lost_task_of_the_highest_priority() -> None:
    nodes = [node("n1"), lost_node("n2"), node("n3"), lost_node("n4"), node("n5")]
    low, high = gang("a", ("n1", "n2")), gang("b", ("n3", "n4"), priority=5, placed_at=500.0)
    plan = plan_losses(planner_of(nodes, [low, high]), ("a", "n2"), ("b", "n4"))
    assert moves(plan) == [("b", "n5"), ("a", None)]


def test_last_free_node_goes_to_the_attempt_that_has_run_longest() -> None:
    nodes = [node("n1"), lost_node("n2"), node("n3"), lost_node("n4"), node("n5")]
    young, old = gang("a", ("n1", "n2"), placed_at=500.0), gang("b", ("n3", "n4"))
    plan = plan_losses(planner_of(nodes, [young, old]), ("a", "n2"), ("b", "n4"))
    assert moves(plan) == [("b", "n5"), ("a", None)]


def test_last_free_node_goes_to_the_project_that_used_less() -> None:
    nodes = [node("n1"), lost_node("n2"), node("n3"), lost_node("n4"), node("n5")]
    heavy, light = gang("a", ("n1", "n2")), gang("b", ("n3", "n4"), project="speech", placed_at=500.0)
    planner = planner_of(nodes, [heavy, light])
    projects = (ProjectInfo(name="vision"), ProjectInfo(name="speech"))
    planner.set_projects(projects, (Usage(project="vision", value=1e6, at=NOW),))
    planner.set_losses((TaskLoss(attempt_id="a", node="n2"), TaskLoss(attempt_id="b", node="n4")))
    assert {usage.project for usage in planner.competing_usages()} == {"vision", "speech"}, (
        "usage decides, so it is recorded with the decision"
    )
    assert moves(planner.plan(NOW)) == [("b", "n5"), ("a", None)]


def test_replacement_evicts_no_job_however_important_its_own_is() -> None:
    nodes = [node("n1"), lost_node("n2"), node("n3")]
    holdings = [gang("a", ("n1", "n2"), priority=80), gang("idle", ("n3",), priority=-100)]
    plan = plan_losses(planner_of(nodes, holdings), ("a", "n2"))
    assert (moves(plan), plan.evictions) == ([("a", None)], ())


def test_lost_node_is_given_to_no_other_job_before_the_move_is_confirmed() -> None:
    """The node may have spoken again when the plan is recorded."""
    planner = planner_of(
        [node("n1"), node("n2"), node("n3")], [gang("a", ("n1", "n2"), excluded_nodes=("n2",))]
    )
    planner.add(waiting("b"))
    plan = plan_losses(planner, ("a", "n2"))
    assert (moves(plan), plan.starts) == ([("a", "n3")], ())
    (moved,) = planner.snapshot().holdings
    planner.hold(moved)
    assert not planner.has_unconfirmed
    (start,) = planner.plan(NOW).starts
    assert [task.node for task in start.allocation] == ["n2"]


def test_move_that_was_not_carried_out_leaves_everything_as_before() -> None:
    planner = planner_of(
        [node("n1"), node("n2"), node("n3")], [gang("a", ("n1", "n2"), excluded_nodes=("n2",))]
    )
    before = planner.snapshot().holdings
    plan_losses(planner, ("a", "n2"))
    planner.undo("a")
    assert planner.snapshot().holdings == before
    planner.add(waiting("b"))
    (start,) = planner.plan(NOW).starts
    assert [task.node for task in start.allocation] == ["n3"]
    planner.release("a", NOW)
    planner.add(waiting("c", request=request(2)))
    (both,) = planner.plan(NOW).starts
    assert {task.node for task in both.allocation} == {"n1", "n2"}, "nothing of the lost task stays taken"


def test_attempt_that_ends_before_its_move_is_confirmed_leaves_nothing_behind() -> None:
    planner = planner_of(
        [node("n1"), node("n2"), node("n3")], [gang("a", ("n1", "n2"), excluded_nodes=("n2",))]
    )
    plan_losses(planner, ("a", "n2"))
    planner.release("a", NOW)
    planner.add(waiting("b", request=request(3)))
    (start,) = planner.plan(NOW).starts
    assert {task.node for task in start.allocation} == {"n1", "n2", "n3"}


def test_project_at_its_limit_gets_its_lost_task_back() -> None:
    planner = planner_of([node("n1"), lost_node("n2"), node("n3")], [gang("a", ("n1", "n2"))])
    planner.set_projects((ProjectInfo(name="vision", limit=DeviceAmounts(gpus=4)),))
    assert moves(plan_losses(planner, ("a", "n2"))) == [("a", "n3")]


def test_quota_kept_for_a_waiting_job_does_not_cost_its_project_a_lost_task() -> None:
    planner = planner_of([node("n1"), lost_node("n2"), node("n3")], [gang("a", ("n1", "n2"))])
    planner.set_projects((ProjectInfo(name="vision", limit=DeviceAmounts(gpus=4)),))
    planner.add(waiting("b"))
    assert planner.plan(NOW).starts == ()
    assert moves(plan_losses(planner, ("a", "n2"))) == [("a", "n3")]


def test_project_whose_limit_was_lowered_does_not_get_its_lost_task_back() -> None:
    planner = planner_of([node("n1"), lost_node("n2"), node("n3")], [gang("a", ("n1", "n2"))])
    planner.set_projects((ProjectInfo(name="vision", limit=DeviceAmounts(gpus=3)),))
    plan = plan_losses(planner, ("a", "n2"))
    assert moves(plan) == [("a", None)]
    (explanation,) = plan.explanations
    assert explanation.why is WaitReason.LIMIT
    assert explanation.facts["lost_node"] == "n2"


def test_rack_gives_the_power_of_the_lost_task_to_its_replacement() -> None:
    labels = {"rack": "r1", "gpu_watts": "100", "idle_watts": "0", "cpu_watts": "0"}
    nodes = [node("n1", labels=labels), lost_node("n2", labels=labels), node("n3", labels=labels)]
    planner = planner_of(nodes, [gang("a", ("n1", "n2"))], power_caps={"r1": 400.0})
    assert moves(plan_losses(planner, ("a", "n2"))) == [("a", "n3")]
    planner.add(waiting("b"))
    assert planner.plan(NOW).starts == (), "and keeps it"


def growing(name: str, priority: int) -> Holding:
    wanted = ResourceRequest(min_nodes=1, max_nodes=2, cpus=1.0, gpus=GpuRequest(count=2))
    return gang(name, ("n4",), request=wanted, is_stopping=True, grows_to=2, priority=priority)


@pytest.mark.parametrize(("priority", "expected"), [(0, None), (1, None), (-1, "n3")])
def test_nodes_of_a_growing_job_of_the_same_priority_are_left_alone(
    priority: int, expected: str | None
) -> None:
    nodes = [node("n1"), lost_node("n2"), node("n3"), node("n4")]
    planner = planner_of(nodes, [gang("a", ("n1", "n2")), growing("elastic", priority)])
    assert moves(plan_losses(planner, ("a", "n2"))) == [("a", expected)]


def test_nodes_kept_for_growth_while_a_task_is_replaced_go_to_a_more_important_job() -> None:
    nodes = [node("n1"), lost_node("n2"), node("n3"), node("n4")]
    planner = planner_of(nodes, [gang("a", ("n1", "n2"), priority=-50), growing("elastic", 0)])
    planner.add(waiting("urgent", priority=50))
    plan = plan_losses(planner, ("a", "n2"))
    assert (moves(plan), [start.attempt_id for start in plan.starts]) == ([("a", None)], ["urgent"])


def test_replacement_stays_in_the_rack_that_the_job_requires() -> None:
    wanted = request(2, topology=TopologyRequest(within="rack"))
    here, there = {"rack": "r1"}, {"rack": "r2"}
    nodes = [node("n1", labels=here), lost_node("n2", labels=here), node("n3", labels=there)]
    planner = planner_of(nodes, [gang("a", ("n1", "n2"), request=wanted)])
    plan = plan_losses(planner, ("a", "n2"))
    assert moves(plan) == [("a", None)]
    assert "not where its `topology` requires" in plan.explanations[0].sentence
    planner.set_node(node("n4", labels=here))
    assert moves(plan_losses(planner, ("a", "n2"))) == [("a", "n4")]


def test_replacement_stays_apart_from_the_other_nodes_if_the_job_spreads() -> None:
    wanted = request(2, topology=TopologyRequest(spread="rack"))
    nodes = [
        node("n1", labels={"rack": "r1"}),
        lost_node("n2", labels={"rack": "r2"}),
        node("n3", labels={"rack": "r1"}),
        node("n4"),
    ]
    planner = planner_of(nodes, [gang("a", ("n1", "n2"), request=wanted)])
    assert moves(plan_losses(planner, ("a", "n2"))) == [("a", None)]
    planner.set_node(node("n5", labels={"rack": "r2"}))
    assert moves(plan_losses(planner, ("a", "n2"))) == [("a", "n5")]


def test_preferred_closeness_keeps_no_node_from_the_replacement() -> None:
    wanted = request(2, topology=TopologyRequest(within="rack", is_required=False))
    nodes = [node("n1", labels={"rack": "r1"}), lost_node("n2"), node("n3", labels={"rack": "r2"})]
    planner = planner_of(nodes, [gang("a", ("n1", "n2"), request=wanted)])
    assert moves(plan_losses(planner, ("a", "n2"))) == [("a", "n3")]


@pytest.mark.parametrize(("begins", "expected"), [(NOW + 500.0, "n3"), (NOW + 499.0, None)])
def test_remaining_time_decides_whether_the_replacement_ends_before_maintenance(
    begins: float, expected: str | None
) -> None:
    wanted = request(2, time_limit_s=NOW + 500.0, grace_s=0.0)
    planner = planner_of([node("n1"), lost_node("n2"), node("n3")], [gang("a", ("n1", "n2"), request=wanted)])
    planner.set_windows(
        [
            Window(
                window_id="w",
                kind=WindowKind.MAINTENANCE,
                nodes=("n3",),
                from_at=begins,
                until_at=begins + 60,
            )
        ]
    )
    assert moves(plan_losses(planner, ("a", "n2"))) == [("a", expected)]


def test_avoided_node_takes_a_lost_task_only_if_no_other_can() -> None:
    planner = planner_of(
        [node("n1"), lost_node("n2"), node("n3"), node("n4")],
        [gang("a", ("n1", "n2"), avoided_nodes=("n3",))],
    )
    assert moves(plan_losses(planner, ("a", "n2"))) == [("a", "n4")]
    planner.undo("a")
    planner.drop_node("n4")
    assert moves(plan_losses(planner, ("a", "n2"))) == [("a", "n3")]


def test_excluded_node_takes_no_lost_task() -> None:
    planner = planner_of(
        [node("n1"), lost_node("n2"), node("n3")], [gang("a", ("n1", "n2"), excluded_nodes=("n3",))]
    )
    assert moves(plan_losses(planner, ("a", "n2"))) == [("a", None)]


def test_reason_that_no_node_is_free_is_the_one_that_waiting_jobs_get() -> None:
    planner = planner_of(
        [node("n1"), lost_node("n2"), node("n3")], [gang("a", ("n1", "n2")), gang("b", ("n3",))]
    )
    plan = plan_losses(planner, ("a", "n2"))
    (explanation,) = plan.explanations
    assert (explanation.attempt_id, explanation.why) == ("a", WaitReason.RESOURCES)
    assert explanation.sentence.startswith("needs 1 node with 2 free GPUs")
    assert explanation.sentence.endswith("none is free")
    assert explanation.hint is None, "a running job's request cannot be changed"
    assert planner.explain_loss("a") == explanation


def test_cluster_without_another_node_is_the_reason_given() -> None:
    planner = planner_of([node("n1"), lost_node("n2")], [gang("a", ("n1", "n2"))])
    (explanation,) = plan_losses(planner, ("a", "n2")).explanations
    assert explanation.why is WaitReason.NODES_EXCLUDED
    assert explanation.sentence.startswith(
        "needs another node with 2 GPUs; the only such nodes are n1 and n2"
    )


def test_reason_is_forgotten_once_the_losses_are_reported_again() -> None:
    planner = planner_of([node("n1"), lost_node("n2")], [gang("a", ("n1", "n2"))])
    plan_losses(planner, ("a", "n2"))
    planner.set_losses(())
    assert planner.explain_loss("a") is None


@pytest.mark.parametrize("loss", [("a", "n3"), ("gone", "n1")])
def test_loss_that_no_longer_matches_the_facts_is_not_planned(loss: tuple[str, str]) -> None:
    planner = planner_of([node("n1"), lost_node("n2"), node("n3")], [gang("a", ("n1", "n2"))])
    assert plan_losses(planner, loss).replacements == ()


def test_each_loss_is_planned_once() -> None:
    planner = planner_of([node("n1"), lost_node("n2"), node("n3")], [gang("a", ("n1", "n2"))])
    (planned,) = plan_losses(planner, ("a", "n2")).replacements
    assert isinstance(planned, PlannedReplacement)
    assert planner.plan(NOW).replacements == ()
    assert planner.snapshot().losses == ()


def test_no_job_is_stopped_to_grow_in_the_plan_that_replaces_a_task() -> None:
    wanted = ResourceRequest(min_nodes=1, max_nodes=2, cpus=1.0, gpus=GpuRequest(count=2))
    nodes = [node("n1"), lost_node("n2"), node("n3"), node("n4"), node("n5")]
    elastic = gang("elastic", ("n3",), request=wanted, checkpoint_at=9e4)
    planner = planner_of(nodes, [gang("a", ("n1", "n2")), elastic])
    assert plan_losses(planner, ("a", "n2"), now=1e5).evictions == ()
    (moved, _) = planner.snapshot().holdings
    planner.hold(moved)
    assert [eviction.attempt_id for eviction in planner.plan(1e5).evictions] == ["elastic"]
