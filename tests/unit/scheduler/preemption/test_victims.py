"""Which jobs are spared, what counts for jobs without a known checkpoint, and for which jobs others stop."""

from __future__ import annotations

import pytest

from shoal.model.job import TopologyRequest
from shoal.model.people import DeviceAmounts
from shoal.scheduler import Candidate, EvictionGround, Holding, Plan, Policy, Snapshot, WaitReason, plan
from shoal.scheduler.facts.amounts import ProjectInfo
from shoal.scheduler.preemption.costs import RESTART_S, lost_device_s
from tests.support.clusters import (
    ALL_GPUS,
    NOW,
    candidate,
    explanation_of,
    holding,
    make_plan,
    node,
    nodes,
    request,
)

PRODUCTION = 50
HALVES = (0, 1, 2, 3), (4, 5, 6, 7)


def evicted(result: Plan) -> list[str]:
    return sorted(eviction.attempt_id for eviction in result.evictions)


def ran(number: int, gpus_by_node: dict[str, tuple[int, ...]], seconds: float, **fields: object) -> Holding:
    return holding(number, gpus_by_node, placed_at=NOW - seconds, **fields)


def saved(number: int, name: str, seconds: float) -> Holding:
    """A job that fills a node for ten hours and saved `seconds` ago."""
    return ran(number, {name: ALL_GPUS}, 36_000.0, checkpoint_at=NOW - seconds)


def in_lab(
    *views: ProjectInfo, held: tuple[Holding, ...], waiting: tuple[Candidate, ...], count: int = 1
) -> Snapshot:
    return Snapshot(nodes=nodes(count), holdings=held, candidates=waiting, projects=views)


def test_job_without_a_known_checkpoint_counts_as_the_median_of_those_that_have_one() -> None:
    """It ran for nine hours; of those who save, the middle one would lose 600 s."""
    silent = ran(9, {"node-04": ALL_GPUS}, 9 * 3600.0)
    wanted = candidate(1, request(gpus=8), priority=PRODUCTION)
    dearer = (saved(1, "node-01", 601.0), saved(2, "node-02", 700.0), saved(3, "node-03", 800.0))
    assert evicted(make_plan(nodes(4), wanted, held=(*dearer, silent))) == ["held-1"]
    cheaper = (saved(1, "node-01", 599.0), saved(2, "node-02", 600.0), saved(3, "node-03", 800.0))
    assert evicted(make_plan(nodes(4), wanted, held=(*cheaper, silent))) == ["held-1"]
    two = candidate(1, request(gpus=8, nodes=3), priority=PRODUCTION)
    assert evicted(make_plan(nodes(4), two, held=(*cheaper, silent))) == ["held-1", "held-2", "held-9"]


def test_bill_without_a_known_checkpoint_states_expected_and_maximum_loss() -> None:
    silent = ran(9, {"node-02": ALL_GPUS}, 9 * 3600.0)
    held = (saved(1, "node-01", 600.0), silent)
    result = make_plan(nodes(2), candidate(1, request(gpus=8, nodes=2), priority=PRODUCTION), held=held)
    bill = next(victim for victim in result.evictions if victim.attempt_id == "held-9")
    assert bill.lost_s == 9 * 3600.0 + RESTART_S
    assert bill.lost_device_s == lost_device_s(silent, NOW)
    assert bill.likely_device_s == pytest.approx(bill.lost_device_s * (600.0 + RESTART_S) / bill.lost_s)


def test_job_that_has_just_begun_counts_no_more_than_its_whole_run() -> None:
    young, held = ran(9, {"node-02": ALL_GPUS}, 5.0), saved(1, "node-01", 600.0)
    result = make_plan(nodes(2), candidate(1, request(gpus=8), priority=PRODUCTION), held=(held, young))
    assert evicted(result) == ["held-9"]
    assert result.evictions[0].likely_device_s == result.evictions[0].lost_device_s


def test_whole_runs_count_if_no_checkpoints_are_known() -> None:
    held = (ran(1, {"node-01": ALL_GPUS}, 500.0), ran(2, {"node-02": ALL_GPUS}, 400.0))
    result = make_plan(nodes(2), candidate(1, request(gpus=8), priority=PRODUCTION), held=held)
    assert evicted(result) == ["held-2"]
    assert result.evictions[0].likely_device_s == result.evictions[0].lost_device_s


def test_job_evicted_max_evictions_times_is_not_evicted_again() -> None:
    held = (
        ran(1, {"node-01": ALL_GPUS}, 10.0, num_evicted=5),
        ran(2, {"node-02": ALL_GPUS}, 9000.0, num_evicted=4),
    )
    wanted = candidate(1, request(gpus=8), priority=PRODUCTION)
    assert evicted(make_plan(nodes(2), wanted, held=held)) == ["held-2"]
    assert not make_plan(nodes(2), wanted, held=held, policy=Policy(max_evictions=4)).evictions
    assert evicted(make_plan(nodes(2), wanted, held=held, policy=Policy(max_evictions=6))) == ["held-1"]


def test_explanation_counts_jobs_that_reached_max_evictions() -> None:
    held = tuple(ran(n, {f"node-0{n}": ALL_GPUS}, 60.0, num_evicted=5) for n in (1, 2))
    wanted = candidate(1, request(gpus=8), priority=PRODUCTION)
    result = explanation_of(make_plan(nodes(2), wanted, held=held), "att-1")
    assert result.why is WaitReason.RESOURCES
    assert result.details[-1] == (
        "2 jobs that it could evict were evicted 5 times already, and keep running until they end"
    )
    assert result.facts["unmoved"] == 2
    never = explanation_of(make_plan(nodes(2), wanted, held=held, policy=Policy(max_evictions=0)), "att-1")
    assert never.details[-1].startswith("no job is evicted here (`max_evictions: 0`): 2 jobs")
    lesser = explanation_of(make_plan(nodes(2), candidate(1, request(gpus=8)), held=held), "att-1")
    assert "unmoved" not in lesser.facts, "it has no ground to evict any job"


LAB = ProjectInfo(name="lab", limit=DeviceAmounts(gpus=8))
VISION = ProjectInfo(name="vision", parent="lab", quota=DeviceAmounts(gpus=4))
SPEECH = ProjectInfo(name="speech", parent="lab")


def test_limit_filled_by_a_borrowing_sibling_is_reclaimed_within_the_quota() -> None:
    """Nodes stand idle: it is the limit above both that is in the way."""
    held = (
        ran(1, {"node-01": HALVES[0]}, 900.0, project="speech"),
        ran(2, {"node-01": HALVES[1]}, 100.0, project="speech"),
        ran(3, {"node-02": ALL_GPUS}, 10.0, project="others"),
    )
    snapshot = in_lab(LAB, VISION, SPEECH, held=held, waiting=(candidate(1, request(gpus=4)),), count=3)
    result = plan(snapshot, Policy(), NOW)
    assert evicted(result) == ["held-2"]
    assert result.evictions[0].ground is EvictionGround.QUOTA
    assert explanation_of(result, "att-1").why is WaitReason.MAKING_ROOM


def test_limit_is_not_reclaimed_beyond_the_own_quota() -> None:
    held = (ran(1, {"node-01": ALL_GPUS}, 900.0, project="speech"),)
    snapshot = in_lab(LAB, VISION, SPEECH, held=held, waiting=(candidate(1, request(gpus=5)),), count=2)
    result = plan(snapshot, Policy(), NOW)
    assert not result.evictions
    assert explanation_of(result, "att-1").why is WaitReason.LIMIT


def test_production_evicts_its_own_project_if_that_is_at_its_limit() -> None:
    held = (
        ran(1, {"node-01": HALVES[0]}, 900.0),
        ran(2, {"node-01": HALVES[1]}, 100.0),
        ran(3, {"node-02": HALVES[1]}, 10.0, project="speech"),
    )
    small = ProjectInfo(name="vision", limit=DeviceAmounts(gpus=8))
    snapshot = in_lab(
        small, held=held, waiting=(candidate(1, request(gpus=2), priority=PRODUCTION),), count=2
    )
    assert evicted(plan(snapshot, Policy(), NOW)) == ["held-2"]


def test_whole_node_job_evicts_all_jobs_on_the_cheapest_node() -> None:
    held = (
        ran(1, {"node-01": HALVES[0]}, 10.0),
        ran(2, {"node-01": HALVES[1]}, 9000.0),
        ran(3, {"node-02": HALVES[0]}, 300.0),
        ran(4, {"node-02": HALVES[1]}, 300.0),
    )
    wanted = candidate(1, request(gpus=1, is_exclusive=True), priority=PRODUCTION)
    assert evicted(make_plan(nodes(2), wanted, held=held)) == ["held-3", "held-4"]


def test_whole_node_job_reclaims_only_if_its_quota_covers_the_whole_node() -> None:
    held = (ran(1, {"node-01": ALL_GPUS}, 900.0, project="speech"),)
    wanted = (candidate(1, request(gpus=1, is_exclusive=True)),)
    for quota, stops in ((4, []), (8, ["held-1"])):
        view = ProjectInfo(name="vision", quota=DeviceAmounts(gpus=quota))
        assert evicted(plan(in_lab(view, held=held, waiting=wanted), Policy(), NOW)) == stops


def test_spread_job_makes_others_stop_on_one_node_of_each_rack() -> None:
    cluster = tuple(node(f"node-{n}", rack=rack) for n, rack in enumerate(("r1", "r1", "r2")))
    held = tuple(ran(n, {f"node-{n}": ALL_GPUS}, seconds) for n, seconds in enumerate((10.0, 20.0, 9000.0)))
    apart = TopologyRequest(spread="rack")
    wanted = candidate(1, request(gpus=8, nodes=2, topology=apart), priority=PRODUCTION)
    assert evicted(make_plan(cluster, wanted, held=held)) == ["held-0", "held-2"]
    three = candidate(1, request(gpus=8, nodes=3, topology=apart), priority=PRODUCTION)
    assert not make_plan(cluster, three, held=held).evictions
