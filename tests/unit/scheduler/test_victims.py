"""Who is spared, what is counted for those nobody knows a checkpoint of, and for whom room is made."""

from __future__ import annotations

import pytest

from shoal.model.people import Devices
from shoal.model.request import TopologyRequest
from shoal.scheduler import Candidate, Ground, Holding, Plan, Policy, Snapshot, Why, plan
from shoal.scheduler.devices import ProjectView
from shoal.scheduler.loss import RESTART_S, lost
from tests.support.clusters import ALL_GPUS, NOW, holding, job, node, nodes, planned, reason, request

PRODUCTION = 50
HALVES = (0, 1, 2, 3), (4, 5, 6, 7)


def evicted(told: Plan) -> list[str]:
    return sorted(eviction.attempt_id for eviction in told.evictions)


def ran(number: int, shares: dict[str, tuple[int, ...]], seconds: float, **fields: object) -> Holding:
    return holding(number, shares, placed_at=NOW - seconds, **fields)


def saved(number: int, name: str, seconds: float) -> Holding:
    """Fills a node, for ten hours, and saved so long ago."""
    return ran(number, {name: ALL_GPUS}, 36_000.0, checkpoint_at=NOW - seconds)


def in_lab(
    *views: ProjectView, held: tuple[Holding, ...], waiting: tuple[Candidate, ...], count: int = 1
) -> Snapshot:
    return Snapshot(nodes=nodes(count), holdings=held, candidates=waiting, projects=views)


def test_job_without_a_known_checkpoint_counts_as_the_median_of_those_that_have_one() -> None:
    """It ran for nine hours; of those who save, the middle one would lose 600 s."""
    silent = ran(9, {"node-04": ALL_GPUS}, 9 * 3600.0)
    wanted = job(1, request(gpus=8), priority=PRODUCTION)
    dearer = (saved(1, "node-01", 601.0), saved(2, "node-02", 700.0), saved(3, "node-03", 800.0))
    assert evicted(planned(nodes(4), wanted, held=(*dearer, silent))) == ["held-1"]
    cheaper = (saved(1, "node-01", 599.0), saved(2, "node-02", 600.0), saved(3, "node-03", 800.0))
    assert evicted(planned(nodes(4), wanted, held=(*cheaper, silent))) == ["held-1"]
    two = job(1, request(gpus=8, nodes=3), priority=PRODUCTION)
    assert evicted(planned(nodes(4), two, held=(*cheaper, silent))) == ["held-1", "held-2", "held-9"]


def test_bill_of_a_job_without_a_known_checkpoint_says_both_what_it_counted_and_the_most_it_loses() -> None:
    silent = ran(9, {"node-02": ALL_GPUS}, 9 * 3600.0)
    held = (saved(1, "node-01", 600.0), silent)
    told = planned(nodes(2), job(1, request(gpus=8, nodes=2), priority=PRODUCTION), held=held)
    bill = next(one for one in told.evictions if one.attempt_id == "held-9")
    assert bill.lost_s == 9 * 3600.0 + RESTART_S
    assert bill.lost_device_s == lost(silent, NOW)
    assert bill.likely_device_s == pytest.approx(bill.lost_device_s * (600.0 + RESTART_S) / bill.lost_s)


def test_job_that_has_just_begun_counts_no_more_than_its_whole_run() -> None:
    young, held = ran(9, {"node-02": ALL_GPUS}, 5.0), saved(1, "node-01", 600.0)
    told = planned(nodes(2), job(1, request(gpus=8), priority=PRODUCTION), held=(held, young))
    assert evicted(told) == ["held-9"]
    assert told.evictions[0].likely_device_s == told.evictions[0].lost_device_s


def test_whole_runs_count_where_nobody_is_known_to_save() -> None:
    held = (ran(1, {"node-01": ALL_GPUS}, 500.0), ran(2, {"node-02": ALL_GPUS}, 400.0))
    told = planned(nodes(2), job(1, request(gpus=8), priority=PRODUCTION), held=held)
    assert evicted(told) == ["held-2"]
    assert told.evictions[0].likely_device_s == told.evictions[0].lost_device_s


def test_job_that_gave_way_as_often_as_anybody_may_runs_on() -> None:
    held = (
        ran(1, {"node-01": ALL_GPUS}, 10.0, num_evicted=5),
        ran(2, {"node-02": ALL_GPUS}, 9000.0, num_evicted=4),
    )
    wanted = job(1, request(gpus=8), priority=PRODUCTION)
    assert evicted(planned(nodes(2), wanted, held=held)) == ["held-2"]
    assert not planned(nodes(2), wanted, held=held, policy=Policy(max_evictions=4)).evictions
    assert evicted(planned(nodes(2), wanted, held=held, policy=Policy(max_evictions=6))) == ["held-1"]


def test_job_that_waits_for_those_who_gave_way_often_enough_is_told_so() -> None:
    held = tuple(ran(n, {f"node-0{n}": ALL_GPUS}, 60.0, num_evicted=5) for n in (1, 2))
    wanted = job(1, request(gpus=8), priority=PRODUCTION)
    said = reason(planned(nodes(2), wanted, held=held), "att-1")
    assert said.why is Why.RESOURCES
    assert said.details[-1] == (
        "2 jobs that it could have stop gave way 5 times already, and run on until they end"
    )
    assert said.facts["unmoved"] == 2
    never = reason(planned(nodes(2), wanted, held=held, policy=Policy(max_evictions=0)), "att-1")
    assert never.details[-1].startswith("nobody gives way here (`max_evictions: 0`): 2 jobs")
    lesser = reason(planned(nodes(2), job(1, request(gpus=8)), held=held), "att-1")
    assert "unmoved" not in lesser.facts, "it has no right to have anybody stop"


LAB = ProjectView(name="lab", limit=Devices(gpus=8))
VISION = ProjectView(name="vision", parent="lab", quota=Devices(gpus=4))
SPEECH = ProjectView(name="speech", parent="lab")


def test_limit_that_a_sibling_filled_by_borrowing_is_taken_back_within_a_quota() -> None:
    """Nodes stand idle: it is the limit above both that is in the way."""
    held = (
        ran(1, {"node-01": HALVES[0]}, 900.0, project="speech"),
        ran(2, {"node-01": HALVES[1]}, 100.0, project="speech"),
        ran(3, {"node-02": ALL_GPUS}, 10.0, project="others"),
    )
    snapshot = in_lab(LAB, VISION, SPEECH, held=held, waiting=(job(1, request(gpus=4)),), count=3)
    told = plan(snapshot, Policy(), NOW)
    assert evicted(told) == ["held-2"]
    assert told.evictions[0].ground is Ground.QUOTA
    assert reason(told, "att-1").why is Why.MAKING_ROOM


def test_limit_is_not_taken_back_beyond_ones_quota() -> None:
    held = (ran(1, {"node-01": ALL_GPUS}, 900.0, project="speech"),)
    snapshot = in_lab(LAB, VISION, SPEECH, held=held, waiting=(job(1, request(gpus=5)),), count=2)
    told = plan(snapshot, Policy(), NOW)
    assert not told.evictions
    assert reason(told, "att-1").why is Why.LIMIT


def test_production_makes_its_own_project_stop_where_that_is_at_its_limit() -> None:
    held = (
        ran(1, {"node-01": HALVES[0]}, 900.0),
        ran(2, {"node-01": HALVES[1]}, 100.0),
        ran(3, {"node-02": HALVES[1]}, 10.0, project="speech"),
    )
    small = ProjectView(name="vision", limit=Devices(gpus=8))
    snapshot = in_lab(small, held=held, waiting=(job(1, request(gpus=2), priority=PRODUCTION),), count=2)
    assert evicted(plan(snapshot, Policy(), NOW)) == ["held-2"]


def test_whole_node_job_makes_everybody_on_the_cheapest_node_stop() -> None:
    held = (
        ran(1, {"node-01": HALVES[0]}, 10.0),
        ran(2, {"node-01": HALVES[1]}, 9000.0),
        ran(3, {"node-02": HALVES[0]}, 300.0),
        ran(4, {"node-02": HALVES[1]}, 300.0),
    )
    wanted = job(1, request(gpus=1, is_exclusive=True), priority=PRODUCTION)
    assert evicted(planned(nodes(2), wanted, held=held)) == ["held-3", "held-4"]


def test_whole_node_job_takes_back_only_what_a_quota_covers_of_the_whole_node() -> None:
    held = (ran(1, {"node-01": ALL_GPUS}, 900.0, project="speech"),)
    wanted = (job(1, request(gpus=1, is_exclusive=True)),)
    for quota, stops in ((4, []), (8, ["held-1"])):
        view = ProjectView(name="vision", quota=Devices(gpus=quota))
        assert evicted(plan(in_lab(view, held=held, waiting=wanted), Policy(), NOW)) == stops


def test_spread_job_makes_others_stop_on_one_node_of_each_rack() -> None:
    cluster = tuple(node(f"node-{n}", rack=rack) for n, rack in enumerate(("r1", "r1", "r2")))
    held = tuple(ran(n, {f"node-{n}": ALL_GPUS}, seconds) for n, seconds in enumerate((10.0, 20.0, 9000.0)))
    apart = TopologyRequest(spread="rack")
    wanted = job(1, request(gpus=8, nodes=2, topology=apart), priority=PRODUCTION)
    assert evicted(planned(cluster, wanted, held=held)) == ["held-0", "held-2"]
    three = job(1, request(gpus=8, nodes=3, topology=apart), priority=PRODUCTION)
    assert not planned(cluster, three, held=held).evictions
