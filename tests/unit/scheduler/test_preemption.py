"""Who is asked to stop for whom, and what that costs, by hand."""

from __future__ import annotations

import msgspec
import pytest

from shoal.model.people import Devices
from shoal.scheduler import Candidate, Ground, Holding, Plan, Planner, Policy, Snapshot, Why, plan
from shoal.scheduler.devices import ProjectView
from shoal.scheduler.loss import RESTART_S, lost, lost_s
from tests.support.clusters import (
    ALL_GPUS,
    NOW,
    holding,
    job,
    nodes,
    placed,
    planned,
    reason,
    request,
    within,
)

PRODUCTION, INTERACTIVE, BATCH = 50, 80, 0
HALVES = (0, 1, 2, 3), (4, 5, 6, 7)


def evicted(told: Plan) -> list[str]:
    return sorted(eviction.attempt_id for eviction in told.evictions)


def ran(number: int, shares: dict[str, tuple[int, ...]], seconds: float, **fields: object) -> Holding:
    return holding(number, shares, placed_at=NOW - seconds, **fields)


def with_projects(
    *views: ProjectView, held: tuple[Holding, ...], waiting: tuple[Candidate, ...], count: int = 1
) -> Snapshot:
    return Snapshot(nodes=nodes(count), holdings=held, candidates=waiting, projects=views)


def test_what_is_lost_is_the_run_since_the_last_checkpoint_and_a_restart_on_every_device() -> None:
    one = ran(1, {"node-01": (0, 1)}, 3600.0)
    assert lost_s(one, NOW) == 3600.0 + RESTART_S
    saved = msgspec.structs.replace(one, checkpoint_at=NOW - 60.0)
    assert lost_s(saved, NOW) == 60.0 + RESTART_S
    assert lost(saved, NOW) == pytest.approx((60.0 + RESTART_S) * (2 + 2 / 64))


def test_checkpoint_of_an_earlier_attempt_is_where_this_one_began() -> None:
    one = msgspec.structs.replace(ran(1, {"node-01": (0,)}, 100.0), checkpoint_at=NOW - 5000.0)
    assert lost_s(one, NOW) == 100.0 + RESTART_S


def test_job_that_leaves_anyway_loses_nothing_by_it() -> None:
    assert lost(ran(1, {"node-01": (0,)}, 100.0, is_leaving=True), NOW) == 0.0


def test_production_evicts_the_batch_job_that_loses_least() -> None:
    held = (
        ran(1, {"node-01": HALVES[0]}, 9000.0),
        ran(2, {"node-01": HALVES[1]}, 8000.0, checkpoint_at=NOW - 30.0),
        ran(3, {"node-02": ALL_GPUS}, 50.0),
    )
    told = planned(nodes(2), job(1, request(gpus=4), priority=PRODUCTION), held=held)
    assert evicted(told) == ["held-2"]
    (eviction,) = told.evictions
    assert (eviction.for_attempt_id, eviction.ground) == ("att-1", Ground.PRIORITY)
    assert eviction.lost_s == 30.0 + RESTART_S
    assert eviction.saved_at == NOW - 30.0
    assert not told.starts


def test_batch_evicts_nobody_whatever_its_number() -> None:
    held = (ran(1, {"node-01": ALL_GPUS}, 10.0, priority=BATCH),)
    assert not planned(nodes(1), job(1, request(gpus=4), priority=40), held=held).evictions


@pytest.mark.parametrize("priority", [PRODUCTION, PRODUCTION + 5, INTERACTIVE])
def test_equal_and_higher_priority_is_left_alone_and_so_is_who_is_not_preemptible(priority: int) -> None:
    held = (ran(1, {"node-01": ALL_GPUS}, 10.0, priority=priority),)
    told = planned(nodes(1), job(1, request(gpus=4), priority=PRODUCTION), held=held)
    assert not told.evictions
    above = planned(nodes(1), job(1, request(gpus=4), priority=INTERACTIVE + 10), held=held)
    assert bool(above.evictions) == (priority < INTERACTIVE)


def test_nobody_is_evicted_where_that_would_not_be_enough() -> None:
    held = (ran(1, {"node-01": HALVES[0]}, 10.0), ran(2, {"node-01": HALVES[1]}, 10.0, priority=INTERACTIVE))
    assert not planned(nodes(1), job(1, request(gpus=8), priority=PRODUCTION), held=held).evictions


def test_free_node_is_used_and_nobody_stops() -> None:
    held = (ran(1, {"node-01": ALL_GPUS}, 10.0),)
    told = planned(nodes(2), job(1, request(gpus=8), priority=PRODUCTION), held=held)
    assert placed(told) == {"att-1": ["node-02"]}
    assert not told.evictions


def test_gang_that_stops_makes_room_on_all_its_nodes_and_is_billed_once() -> None:
    """Its two nodes together cost less than the cheapest single ones."""
    gang = ran(1, {"node-01": ALL_GPUS, "node-02": ALL_GPUS}, 300.0)
    held = (gang, ran(2, {"node-03": ALL_GPUS}, 400.0), ran(3, {"node-04": ALL_GPUS}, 9000.0))
    told = planned(nodes(4), job(1, request(gpus=8, nodes=2), priority=PRODUCTION), held=held)
    assert evicted(told) == ["held-1"]
    assert told.evictions[0].lost_device_s == lost(gang, NOW)


def test_victim_that_turns_out_not_to_be_needed_is_spared() -> None:
    """The single is the cheapest node alone; with the gang, whose two nodes do, it is not needed."""
    held = (
        ran(1, {"node-01": ALL_GPUS, "node-02": ALL_GPUS}, 5000.0),
        ran(2, {"node-03": ALL_GPUS}, 10.0),
    )
    told = planned(nodes(3), job(1, request(gpus=8, nodes=2), priority=PRODUCTION), held=held)
    assert evicted(told) == ["held-1"]


def test_part_of_a_gang_that_fits_beside_it_needs_only_what_is_missing() -> None:
    held = (ran(1, {"node-01": ALL_GPUS}, 100.0), ran(2, {"node-02": ALL_GPUS}, 10.0))
    told = planned(nodes(4), job(1, request(gpus=8, nodes=3), priority=PRODUCTION), held=held)
    assert evicted(told) == ["held-2"]


def test_small_job_is_preferred_to_a_large_one_that_saved_later() -> None:
    held = (
        ran(1, {"node-01": (0,)}, 300.0),
        ran(2, {"node-01": (1, 2, 3, 4, 5, 6, 7)}, 200.0),
        ran(3, {"node-02": ALL_GPUS}, 200.0),
    )
    assert evicted(planned(nodes(2), job(1, request(gpus=1), priority=PRODUCTION), held=held)) == ["held-1"]


def test_close_gang_evicts_inside_one_rack() -> None:
    racks = tuple(
        msgspec.structs.replace(one, labels={"rack": rack})
        for one, rack in zip(nodes(4), ("r1", "r1", "r2", "r2"), strict=True)
    )
    held = tuple(
        ran(number, {f"node-0{number}": ALL_GPUS}, seconds)
        for number, seconds in ((1, 10.0), (2, 9000.0), (3, 400.0), (4, 500.0))
    )
    asked = request(gpus=8, nodes=2, topology=within("rack"))
    assert evicted(planned(racks, job(1, asked, priority=PRODUCTION), held=held)) == ["held-3", "held-4"]


def test_room_that_is_being_made_is_kept_and_nobody_else_is_asked() -> None:
    held = (ran(1, {"node-01": ALL_GPUS}, 10.0, is_leaving=True), ran(2, {"node-02": ALL_GPUS}, 10.0))
    told = planned(
        nodes(2),
        job(1, request(gpus=8), priority=PRODUCTION),
        job(2, request(gpus=1), priority=BATCH),
        held=held,
    )
    assert not told.evictions
    assert [promise.nodes for promise in told.promises] == [("node-01",)]
    why = reason(told, "att-1")
    assert why.why is Why.MAKING_ROOM
    assert why.sentence.startswith("is making room: 1 job is stopping")


def test_what_is_left_beside_the_room_may_be_used() -> None:
    held = (ran(1, {"node-01": (0, 1, 2, 3, 4)}, 10.0),)
    told = planned(
        nodes(1),
        job(1, request(gpus=6), priority=PRODUCTION),
        job(2, request(gpus=2)),
        job(3, request(gpus=1)),
        held=held,
    )
    assert evicted(told) == ["held-1"]
    assert placed(told) == {"att-2": ["node-01"]}


def test_several_jobs_have_room_made_at_once_even_on_one_node() -> None:
    held = tuple(ran(number, {"node-01": (number,)}, 100.0 * (number + 1)) for number in range(8))
    waiting = tuple(job(number, request(gpus=1), priority=INTERACTIVE) for number in range(3))
    assert evicted(planned(nodes(1), *waiting, held=held)) == ["held-0", "held-1", "held-2"]


VISION = ProjectView(name="vision", quota=Devices(gpus=8))
SPEECH = ProjectView(name="speech", quota=Devices(gpus=4))


def test_project_within_its_quota_takes_back_what_was_borrowed() -> None:
    held = (
        ran(1, {"node-01": HALVES[0]}, 900.0, project="speech"),
        ran(2, {"node-01": HALVES[1]}, 100.0, project="speech"),
    )
    told = plan(with_projects(VISION, SPEECH, held=held, waiting=(job(1, request(gpus=4)),)), Policy(), NOW)
    assert evicted(told) == ["held-2"]
    assert told.evictions[0].ground is Ground.QUOTA


def test_no_more_is_taken_back_than_was_borrowed() -> None:
    held = tuple(ran(n, {"node-01": half}, 100.0 * n, project="speech") for n, half in enumerate(HALVES, 1))
    waiting = (job(1, request(gpus=4)), job(2, request(gpus=4)))
    told = plan(with_projects(VISION, SPEECH, held=held, waiting=waiting), Policy(), NOW)
    assert evicted(told) == ["held-1"]
    leaving = (msgspec.structs.replace(held[0], is_leaving=True), held[1])
    again = plan(with_projects(VISION, SPEECH, held=leaving, waiting=waiting), Policy(), NOW)
    assert not again.evictions


def test_nothing_is_taken_back_above_ones_own_quota_nor_from_a_higher_priority() -> None:
    held = (ran(1, {"node-01": ALL_GPUS}, 900.0, project="speech"),)
    small = ProjectView(name="vision", quota=Devices(gpus=2))
    waiting = (job(1, request(gpus=4)),)
    assert not plan(with_projects(small, SPEECH, held=held, waiting=waiting), Policy(), NOW).evictions
    higher = (msgspec.structs.replace(held[0], priority=1),)
    assert not plan(with_projects(VISION, SPEECH, held=higher, waiting=waiting), Policy(), NOW).evictions


def _carry_out(planner: Planner, told: Plan, now: float) -> int:
    """Whoever is asked to stop is gone at once and waits again."""
    held = {one.attempt_id: one for one in planner.snapshot().holdings}
    for eviction in told.evictions:
        one = held[eviction.attempt_id]
        planner.release(one.attempt_id, now)
        number = int(one.attempt_id.split("-")[1].split(".")[0])
        count = len(one.allocation[0].gpu_ids)
        planner.add(
            msgspec.structs.replace(
                job(number, request(gpus=count), project=one.project, priority=one.priority),
                attempt_id=f"held-{number}.{now}",
                submitted_at=0.0,
                due_at=0.0,
            )
        )
    return len(told.evictions)


@pytest.mark.parametrize("parent", [None, "lab"])
def test_evicted_job_does_not_come_back_in_place_of_the_one_it_gave_way_to(parent: str | None) -> None:
    """Even though it is due first, its project had less lately, and is within the quota above it."""
    views = [
        ProjectView(name="vision", quota=Devices(gpus=8), parent=parent),
        ProjectView(name="speech", quota=Devices(gpus=4), parent=parent, weight=1000.0),
    ]
    if parent is not None:
        views.append(ProjectView(name=parent, quota=Devices(gpus=64)))
    held = (ran(1, {"node-01": ALL_GPUS}, 900.0, project="speech"),)
    planner = Planner.of(with_projects(*views, held=held, waiting=(job(7, request(gpus=8)),)), Policy())
    now, num_evicted, started = NOW, 0, []
    for _ in range(6):
        told = planner.plan(now)
        started += [start.attempt_id for start in told.starts]
        num_evicted += _carry_out(planner, told, now)
        now += 60.0
    assert (num_evicted, started) == (1, ["att-7"])
