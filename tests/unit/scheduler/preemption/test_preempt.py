"""Which jobs are evicted for which, and what that costs, worked out by hand."""

from __future__ import annotations

import msgspec
import pytest

from shoal.model.people import DeviceAmounts
from shoal.scheduler import (
    Candidate,
    EvictionGround,
    Holding,
    Plan,
    Planner,
    Policy,
    Snapshot,
    WaitReason,
    plan,
)
from shoal.scheduler.facts.amounts import ProjectInfo
from shoal.scheduler.preemption.costs import RESTART_S, lost_device_s, lost_s
from shoal.scheduler.preemption.victims import NUM_DOMAINS
from tests.support.clusters import (
    ALL_GPUS,
    NOW,
    candidate,
    explanation_of,
    holding,
    make_plan,
    node,
    nodes,
    placements,
    request,
    within_label,
)

PRODUCTION, INTERACTIVE, BATCH = 50, 80, 0
HALVES = (0, 1, 2, 3), (4, 5, 6, 7)


def evicted(result: Plan) -> list[str]:
    return sorted(eviction.attempt_id for eviction in result.evictions)


def ran(number: int, gpus_by_node: dict[str, tuple[int, ...]], seconds: float, **fields: object) -> Holding:
    return holding(number, gpus_by_node, placed_at=NOW - seconds, **fields)


def with_projects(
    *views: ProjectInfo, held: tuple[Holding, ...], waiting: tuple[Candidate, ...], count: int = 1
) -> Snapshot:
    return Snapshot(nodes=nodes(count), holdings=held, candidates=waiting, projects=views)


def test_loss_is_the_run_since_the_last_checkpoint_and_a_restart_on_every_device() -> None:
    victim = ran(1, {"node-01": (0, 1)}, 3600.0)
    assert lost_s(victim, NOW) == 3600.0 + RESTART_S
    saved = msgspec.structs.replace(victim, checkpoint_at=NOW - 60.0)
    assert lost_s(saved, NOW) == 60.0 + RESTART_S
    assert lost_device_s(saved, NOW) == pytest.approx((60.0 + RESTART_S) * (2 + 2 / 64))


def test_checkpoint_of_an_earlier_attempt_counts_as_the_start_of_this_one() -> None:
    victim = msgspec.structs.replace(ran(1, {"node-01": (0,)}, 100.0), checkpoint_at=NOW - 5000.0)
    assert lost_s(victim, NOW) == 100.0 + RESTART_S


def test_stopping_job_loses_nothing_by_eviction() -> None:
    assert lost_device_s(ran(1, {"node-01": (0,)}, 100.0, is_stopping=True), NOW) == 0.0


def test_production_evicts_the_batch_job_that_loses_least() -> None:
    held = (
        ran(1, {"node-01": HALVES[0]}, 9000.0),
        ran(2, {"node-01": HALVES[1]}, 8000.0, checkpoint_at=NOW - 30.0),
        ran(3, {"node-02": ALL_GPUS}, 50.0),
    )
    result = make_plan(nodes(2), candidate(1, request(gpus=4), priority=PRODUCTION), held=held)
    assert evicted(result) == ["held-2"]
    (eviction,) = result.evictions
    assert (eviction.for_attempt_id, eviction.ground) == ("att-1", EvictionGround.PRIORITY)
    assert eviction.lost_s == 30.0 + RESTART_S
    assert eviction.saved_at == NOW - 30.0
    assert not result.starts


def test_batch_priority_evicts_no_job_whatever_its_number() -> None:
    held = (ran(1, {"node-01": ALL_GPUS}, 10.0, priority=BATCH),)
    assert not make_plan(nodes(1), candidate(1, request(gpus=4), priority=40), held=held).evictions


@pytest.mark.parametrize("priority", [PRODUCTION, PRODUCTION + 5, INTERACTIVE])
def test_equal_priority_higher_priority_and_non_preemptible_jobs_are_not_evicted(priority: int) -> None:
    held = (ran(1, {"node-01": ALL_GPUS}, 10.0, priority=priority),)
    result = make_plan(nodes(1), candidate(1, request(gpus=4), priority=PRODUCTION), held=held)
    assert not result.evictions
    above = make_plan(nodes(1), candidate(1, request(gpus=4), priority=INTERACTIVE + 10), held=held)
    assert bool(above.evictions) == (priority < INTERACTIVE)


def test_no_job_is_evicted_if_that_would_not_be_enough() -> None:
    held = (ran(1, {"node-01": HALVES[0]}, 10.0), ran(2, {"node-01": HALVES[1]}, 10.0, priority=INTERACTIVE))
    assert not make_plan(nodes(1), candidate(1, request(gpus=8), priority=PRODUCTION), held=held).evictions


def test_free_node_is_used_and_no_job_is_evicted() -> None:
    held = (ran(1, {"node-01": ALL_GPUS}, 10.0),)
    result = make_plan(nodes(2), candidate(1, request(gpus=8), priority=PRODUCTION), held=held)
    assert placements(result) == {"att-1": ["node-02"]}
    assert not result.evictions


def test_evicted_gang_frees_all_its_nodes_and_is_billed_once() -> None:
    """Its two nodes together cost less than the cheapest single ones."""
    gang = ran(1, {"node-01": ALL_GPUS, "node-02": ALL_GPUS}, 300.0)
    held = (gang, ran(2, {"node-03": ALL_GPUS}, 400.0), ran(3, {"node-04": ALL_GPUS}, 9000.0))
    result = make_plan(nodes(4), candidate(1, request(gpus=8, nodes=2), priority=PRODUCTION), held=held)
    assert evicted(result) == ["held-1"]
    assert result.evictions[0].lost_device_s == lost_device_s(gang, NOW)


def test_victim_that_turns_out_not_to_be_needed_is_spared() -> None:
    """The single job is the cheapest alone. With the gang, whose two nodes are enough, it is not needed."""
    held = (
        ran(1, {"node-01": ALL_GPUS, "node-02": ALL_GPUS}, 5000.0),
        ran(2, {"node-03": ALL_GPUS}, 10.0),
    )
    result = make_plan(nodes(3), candidate(1, request(gpus=8, nodes=2), priority=PRODUCTION), held=held)
    assert evicted(result) == ["held-1"]


def test_part_of_a_gang_that_fits_beside_it_needs_only_what_is_missing() -> None:
    held = (ran(1, {"node-01": ALL_GPUS}, 100.0), ran(2, {"node-02": ALL_GPUS}, 10.0))
    result = make_plan(nodes(4), candidate(1, request(gpus=8, nodes=3), priority=PRODUCTION), held=held)
    assert evicted(result) == ["held-2"]


def test_small_job_is_preferred_to_a_large_one_that_saved_later() -> None:
    held = (
        ran(1, {"node-01": (0,)}, 300.0),
        ran(2, {"node-01": (1, 2, 3, 4, 5, 6, 7)}, 200.0),
        ran(3, {"node-02": ALL_GPUS}, 200.0),
    )
    assert evicted(make_plan(nodes(2), candidate(1, request(gpus=1), priority=PRODUCTION), held=held)) == [
        "held-1"
    ]


def test_close_gang_evicts_inside_one_rack() -> None:
    racks = tuple(
        msgspec.structs.replace(node, labels={"rack": rack})
        for node, rack in zip(nodes(4), ("r1", "r1", "r2", "r2"), strict=True)
    )
    held = tuple(
        ran(number, {f"node-0{number}": ALL_GPUS}, seconds)
        for number, seconds in ((1, 10.0), (2, 9000.0), (3, 400.0), (4, 500.0))
    )
    wanted = request(gpus=8, nodes=2, topology=within_label("rack"))
    assert evicted(make_plan(racks, candidate(1, wanted, priority=PRODUCTION), held=held)) == [
        "held-3",
        "held-4",
    ]


def test_nodes_being_freed_are_reserved_and_no_other_job_is_evicted() -> None:
    held = (ran(1, {"node-01": ALL_GPUS}, 10.0, is_stopping=True), ran(2, {"node-02": ALL_GPUS}, 10.0))
    result = make_plan(
        nodes(2),
        candidate(1, request(gpus=8), priority=PRODUCTION),
        candidate(2, request(gpus=1), priority=BATCH),
        held=held,
    )
    assert not result.evictions
    assert [promise.nodes for promise in result.promises] == [("node-01",)]
    why = explanation_of(result, "att-1")
    assert why.why is WaitReason.MAKING_ROOM
    assert why.sentence.startswith("is making room: 1 job is stopping")


def test_capacity_beside_freed_nodes_may_be_used() -> None:
    held = (ran(1, {"node-01": (0, 1, 2, 3, 4)}, 10.0),)
    result = make_plan(
        nodes(1),
        candidate(1, request(gpus=6), priority=PRODUCTION),
        candidate(2, request(gpus=2)),
        candidate(3, request(gpus=1)),
        held=held,
    )
    assert evicted(result) == ["held-1"]
    assert placements(result) == {"att-2": ["node-01"]}


def test_several_jobs_can_have_others_stop_on_one_node_at_once() -> None:
    held = tuple(ran(number, {"node-01": (number,)}, 100.0 * (number + 1)) for number in range(8))
    waiting = tuple(candidate(number, request(gpus=1), priority=INTERACTIVE) for number in range(3))
    assert evicted(make_plan(nodes(1), *waiting, held=held)) == ["held-0", "held-1", "held-2"]


VISION = ProjectInfo(name="vision", quota=DeviceAmounts(gpus=8))
SPEECH = ProjectInfo(name="speech", quota=DeviceAmounts(gpus=4))


def test_project_within_its_quota_reclaims_borrowed_devices() -> None:
    held = (
        ran(1, {"node-01": HALVES[0]}, 900.0, project="speech"),
        ran(2, {"node-01": HALVES[1]}, 100.0, project="speech"),
    )
    result = plan(
        with_projects(VISION, SPEECH, held=held, waiting=(candidate(1, request(gpus=4)),)), Policy(), NOW
    )
    assert evicted(result) == ["held-2"]
    assert result.evictions[0].ground is EvictionGround.QUOTA


def test_no_more_is_reclaimed_than_was_borrowed() -> None:
    held = tuple(ran(n, {"node-01": half}, 100.0 * n, project="speech") for n, half in enumerate(HALVES, 1))
    waiting = (candidate(1, request(gpus=4)), candidate(2, request(gpus=4)))
    result = plan(with_projects(VISION, SPEECH, held=held, waiting=waiting), Policy(), NOW)
    assert evicted(result) == ["held-1"]
    stopping = (msgspec.structs.replace(held[0], is_stopping=True), held[1])
    next_plan = plan(with_projects(VISION, SPEECH, held=stopping, waiting=waiting), Policy(), NOW)
    assert not next_plan.evictions


def test_nothing_is_reclaimed_above_the_own_quota_or_from_a_higher_priority() -> None:
    held = (ran(1, {"node-01": ALL_GPUS}, 900.0, project="speech"),)
    small = ProjectInfo(name="vision", quota=DeviceAmounts(gpus=2))
    waiting = (candidate(1, request(gpus=4)),)
    assert not plan(with_projects(small, SPEECH, held=held, waiting=waiting), Policy(), NOW).evictions
    higher = (msgspec.structs.replace(held[0], priority=1),)
    assert not plan(with_projects(VISION, SPEECH, held=higher, waiting=waiting), Policy(), NOW).evictions


def _carry_out(planner: Planner, result: Plan, now: float) -> int:
    """Whoever is asked to stop is gone at once and waits again."""
    held = {victim.attempt_id: victim for victim in planner.snapshot().holdings}
    for eviction in result.evictions:
        victim = held[eviction.attempt_id]
        planner.release(victim.attempt_id, now)
        number = int(victim.attempt_id.split("-")[1].split(".")[0])
        count = len(victim.allocation[0].gpu_ids)
        planner.add(
            msgspec.structs.replace(
                candidate(number, request(gpus=count), project=victim.project, priority=victim.priority),
                attempt_id=f"held-{number}.{now}",
                submitted_at=0.0,
                due_at=0.0,
            )
        )
    return len(result.evictions)


@pytest.mark.parametrize("parent", [None, "lab"])
def test_evicted_job_does_not_evict_the_job_it_was_evicted_for(parent: str | None) -> None:
    """Even though it is due first, its project had less lately, and is within the quota above it."""
    views = [
        ProjectInfo(name="vision", quota=DeviceAmounts(gpus=8), parent=parent),
        ProjectInfo(name="speech", quota=DeviceAmounts(gpus=4), parent=parent, weight=1000.0),
    ]
    if parent is not None:
        views.append(ProjectInfo(name=parent, quota=DeviceAmounts(gpus=64)))
    held = (ran(1, {"node-01": ALL_GPUS}, 900.0, project="speech"),)
    planner = Planner.of(with_projects(*views, held=held, waiting=(candidate(7, request(gpus=8)),)), Policy())
    now, num_evicted, started = NOW, 0, []
    for _ in range(6):
        result = planner.plan(now)
        started += [start.attempt_id for start in result.starts]
        num_evicted += _carry_out(planner, result, now)
        now += 60.0
    assert (num_evicted, started) == (1, ["att-7"])


def test_close_gang_evicts_in_the_cheapest_of_many_racks() -> None:
    """The names of the racks say nothing, and more racks could serve than are compared in detail."""
    count = NUM_DOMAINS + 3
    racks = tuple(
        node(f"node-{number}{half}", rack=f"r{number}") for number in range(count) for half in ("a", "b")
    )
    held = tuple(
        ran(2 * number + index, {f"node-{number}{half}": ALL_GPUS}, 1000.0 * (count - number))
        for number in range(count)
        for index, half in enumerate(("a", "b"))
    )
    wanted = request(gpus=8, nodes=2, topology=within_label("rack"))
    last = 2 * (count - 1)
    assert evicted(make_plan(racks, candidate(1, wanted, priority=PRODUCTION), held=held)) == [
        f"held-{last}",
        f"held-{last + 1}",
    ]


def test_job_that_others_stop_for_counts_once_against_the_limit_of_its_project() -> None:
    """Eight GPUs are being freed for the first job, so four of twelve are left for the other jobs."""
    held = (
        ran(1, {"node-01": ALL_GPUS}, 100.0, project="speech"),
        ran(2, {"node-02": HALVES[0]}, 100.0, project="speech", priority=INTERACTIVE),
    )
    waiting = (
        candidate(1, request(gpus=8), priority=PRODUCTION),
        candidate(2, request(gpus=3)),
        candidate(3, request(gpus=1)),
    )
    vision = ProjectInfo(name="vision", limit=DeviceAmounts(gpus=12))
    facts = with_projects(vision, ProjectInfo(name="speech"), held=held, waiting=waiting, count=2)
    result = plan(facts, Policy(), NOW)
    assert evicted(result) == ["held-1"]
    assert placements(result) == {"att-2": ["node-02"], "att-3": ["node-02"]}
