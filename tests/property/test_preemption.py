"""Invariants of every eviction, whatever runs and whatever waits."""

from __future__ import annotations

from math import inf
from typing import Any

import msgspec
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from shoal.model.job import GpuRequest, ResourceRequest, TopologyRequest
from shoal.model.people import DeviceAmounts
from shoal.scheduler import (
    Candidate,
    Eviction,
    EvictionGround,
    GpuInfo,
    Holding,
    NodeInfo,
    Plan,
    Planner,
    Policy,
    Snapshot,
    plan,
)
from shoal.scheduler.facts.amounts import ProjectInfo, demand_of, held_devices, minimum_devices
from shoal.scheduler.facts.policy import PriorityClass
from shoal.scheduler.order.project_tree import ProjectTree
from shoal.scheduler.preemption import options
from shoal.scheduler.preemption.costs import RESTART_S, lost_device_s

NOW = 10_000.0


def _asked(nodes: int, gpus: int, **fields: Any) -> ResourceRequest:
    gpu_request = GpuRequest(count=gpus, kind=None) if gpus else None
    return ResourceRequest(min_nodes=nodes, max_nodes=nodes, cpus=1.0, gpus=gpu_request, **fields)


CLASSES = (
    PriorityClass(name="batch", value=-1),
    PriorityClass(name="sacred", value=0, is_preemptible=False),
    PriorityClass(name="urgent", value=1, can_preempt=True),
    PriorityClass(name="urgent too", value=2, can_preempt=True),
)
POLICY = Policy(classes=CLASSES, patience_s=inf)
TWISTS: tuple[dict[str, Any], ...] = ({}, {}, {}, {"array_id": "arr", "array_at_once": 2})
RUNNING, WAITING = (-1, -1, -1, -1, 0, 1), (-1, -1, 0, 1, 2, 2)
QUOTAS = st.one_of(
    st.none(), st.builds(DeviceAmounts, gpus=st.integers(0, 9), cpus=st.sampled_from([None, 2.0, 9.0]))
)
PARENTS = ((None, None), ("lab", "lab"), (None, "vision"))
LIMITS = st.one_of(st.none(), st.none(), st.builds(DeviceAmounts, gpus=st.integers(1, 12)))
NEAR, APART = TopologyRequest(within="rack"), TopologyRequest(spread="rack")
REQUESTS = (
    *(_asked(1, gpus) for gpus in (1, 1, 2, 3, 4)),
    *(_asked(2, gpus) for gpus in (1, 2, 4)),
    _asked(3, 1),
    _asked(1, 0),
    _asked(2, 0),
    _asked(2, 2, topology=NEAR),
    _asked(2, 2, topology=APART),
    _asked(1, 1, is_exclusive=True),
    _asked(2, 0, is_exclusive=True),
)


@st.composite
def jobs(draw: st.DrawFn, number: int, priorities: tuple[int, ...]) -> Candidate:
    return Candidate(
        attempt_id=f"att-{number}",
        job_id=f"job-{number}",
        project=draw(st.sampled_from(["vision", "speech"])),
        priority=draw(st.sampled_from(priorities)),
        order=number,
        submitted_at=NOW - number,
        request=draw(st.sampled_from(REQUESTS)),
        **draw(st.sampled_from(TWISTS)),
    )


@st.composite
def contested(draw: st.DrawFn) -> Snapshot:
    """A small cluster, as full as it gets, in two projects with or without quotas."""
    gpus = tuple(GpuInfo(index, "A100") for index in range(4))
    racks = draw(st.lists(st.sampled_from(["r1", "r2"]), min_size=1, max_size=4))
    views = tuple(
        NodeInfo(name=f"n{number}", cpus=4.0, memory_bytes=64, gpus=gpus, labels={"rack": rack})
        for number, rack in enumerate(racks)
    )
    running = tuple(draw(jobs(number, RUNNING)) for number in range(draw(st.integers(3, 14))))
    filler = msgspec.structs.replace(draw(jobs(0, (-1,))), array_id=None, array_at_once=None)
    fillers = tuple(
        msgspec.structs.replace(
            filler, attempt_id=f"fill-{n:02}", job_id=f"fill-{n:02}", request=_asked(1, 1)
        )
        for n in range(draw(st.sampled_from([16, 16, 3, 0])))
    )
    first = Planner.of(Snapshot(nodes=views, holdings=(), candidates=running + fillers), Policy())
    first.plan(NOW)
    holdings = tuple(
        msgspec.structs.replace(
            item,
            placed_at=NOW - draw(st.sampled_from([0.0, 100.0, 5000.0])),
            checkpoint_at=draw(st.sampled_from([None, NOW - 5.0, NOW - 90.0])),
            is_stopping=draw(st.sampled_from([False] * 7 + [True])),
            num_evicted=draw(st.sampled_from([0, 0, 0, 4, 5])),
        )
        for item in first.snapshot().holdings
    )
    waiting = tuple(draw(jobs(number, WAITING)) for number in range(20, 20 + draw(st.integers(1, 6))))
    projects = tuple(
        ProjectInfo(name=name, parent=parent, quota=draw(QUOTAS), limit=draw(LIMITS))
        for name, parent in zip(("vision", "speech"), draw(st.sampled_from(PARENTS)), strict=True)
    )
    above = tuple(
        ProjectInfo(name="lab", quota=draw(QUOTAS), limit=draw(LIMITS))
        for item in projects[:1]
        if item.parent
    )
    return Snapshot(nodes=views, holdings=holdings, candidates=waiting, projects=(*projects, *above))


def by_head(result: Plan) -> dict[str, list[Eviction]]:
    heads: dict[str, list[Eviction]] = {}
    for eviction in result.evictions:
        heads.setdefault(eviction.for_attempt_id, []).append(eviction)
    return heads


def starts_without(snapshot: Snapshot, head: Candidate, gone: set[str]) -> bool:
    """Whether it starts at once if no other job waits and those in `gone` do not run."""
    left = tuple(item for item in snapshot.holdings if item.attempt_id not in gone)
    alone = msgspec.structs.replace(snapshot, holdings=left, candidates=(head,))
    return bool(plan(alone, POLICY, NOW).starts)


@given(contested(), st.booleans())
def test_victims_are_sufficient_and_none_could_be_spared(snapshot: Snapshot, is_rough: bool) -> None:
    """For one head alone, because other waiting jobs may block it for good reason."""
    with pytest.MonkeyPatch.context() as patch:
        if is_rough:
            patch.setattr(options, "NUM_SETS", 0)
        _check_each_alone(snapshot)


def _check_each_alone(snapshot: Snapshot) -> None:
    leaving = {item.attempt_id for item in snapshot.holdings if item.is_stopping}
    for head in snapshot.candidates:
        alone = msgspec.structs.replace(snapshot, candidates=(head,))
        stops = {eviction.attempt_id for eviction in plan(alone, POLICY, NOW).evictions}
        if not stops:
            continue
        event("a job is evicted")
        assert starts_without(snapshot, head, leaving | stops)
        for item in stops:
            assert not starts_without(snapshot, head, leaving | stops - {item})


@given(contested())
def test_every_eviction_has_a_bill_with_the_full_loss(snapshot: Snapshot) -> None:
    result = plan(snapshot, POLICY, NOW)
    held = {item.attempt_id: item for item in snapshot.holdings}
    ids = [eviction.attempt_id for eviction in result.evictions]
    assert len(set(ids)) == len(ids)
    for eviction in result.evictions:
        victim = held[eviction.attempt_id]
        assert not victim.is_stopping
        assert eviction.lost_device_s == lost_device_s(victim, NOW) > 0
        assert eviction.lost_s >= NOW - victim.placed_at + RESTART_S or victim.checkpoint_at is not None
        assert 0 < eviction.likely_device_s <= eviction.lost_device_s
        if victim.checkpoint_at is not None:
            assert eviction.likely_device_s == eviction.lost_device_s
        assert eviction.for_attempt_id not in {start.attempt_id for start in result.starts}


@given(contested())
def test_no_job_is_evicted_without_a_ground(snapshot: Snapshot) -> None:
    result = plan(snapshot, POLICY, NOW)
    held = {item.attempt_id: item for item in snapshot.holdings}
    waiting = {item.attempt_id: item for item in snapshot.candidates}
    for eviction in result.evictions:
        victim, head = held[eviction.attempt_id], waiting[eviction.for_attempt_id]
        assert victim.priority != 0, "a class that is not preemptible"
        assert victim.num_evicted < POLICY.max_evictions
        if eviction.ground is EvictionGround.PRIORITY:
            assert head.priority > victim.priority
            assert head.priority >= 1
        else:
            event("something is taken back")
            assert head.priority >= victim.priority
            assert head.project != victim.project


def _tree(snapshot: Snapshot, without: set[str]) -> ProjectTree:
    tree = ProjectTree(snapshot.projects)
    for item in snapshot.holdings:
        if item.attempt_id not in without and not item.is_stopping:
            tree.take(item.project, held_devices(item.allocation))
    return tree


@given(contested())
def test_quotas_hold_after_all_evictions_and_starts(snapshot: Snapshot) -> None:
    """A project that reclaims stays within a quota, and the last of its victims was above its own quota until
    then.
    """
    result = plan(snapshot, POLICY, NOW)
    waiting = {item.attempt_id: item for item in snapshot.candidates}
    held = {item.attempt_id: item for item in snapshot.holdings}
    for head_id, evictions in by_head(result).items():
        head = waiting[head_id]
        reclaimed = [eviction.attempt_id for eviction in evictions if eviction.ground is EvictionGround.QUOTA]
        amount = minimum_devices(demand_of(head.request))
        if reclaimed:
            after = _tree(snapshot, {eviction.attempt_id for eviction in result.evictions})
            assert any(after.quota_coverage(head.project, amount))
        above = {view.name for view in ProjectTree(snapshot.projects).ancestry(head.project)}
        # A parent's own jobs have no quota against a child's quota: all that they hold may be reclaimed.
        for project in {held[item].project for item in reclaimed} - above:
            largest = max((held[o] for o in reclaimed if held[o].project == project), key=_size)
            before = _tree(snapshot, {item for item in reclaimed if item != largest.attempt_id})
            over = before.over_quota(project)
            assert over.milligpus > 0 if amount.milligpus else over.millicpus > 0


def _size(holding: Holding) -> tuple[object, str]:
    return held_devices(holding.allocation), holding.attempt_id


@given(contested())
def test_evictions_come_to_an_end(snapshot: Snapshot) -> None:
    """Each evicted job waits again, and nothing else happens. Evictions must stop soon."""
    planner = Planner.of(snapshot, POLICY)
    candidates = {item.attempt_id: item for item in snapshot.candidates}
    now, rounds = NOW, 0
    while True:
        result = planner.plan(now)
        if not result.evictions:
            break
        rounds += 1
        assert rounds <= len(snapshot.holdings) + len(snapshot.candidates), "back and forth"
        held = {item.attempt_id: item for item in planner.snapshot().holdings}
        for eviction in result.evictions:
            planner.release(eviction.attempt_id, now)
            resubmitted = _resubmitted(held[eviction.attempt_id], candidates.get(eviction.attempt_id))
            planner.add(resubmitted)
            candidates[resubmitted.attempt_id] = resubmitted
        now += 1.0
    event(f"{rounds} rounds")


def _resubmitted(holding: Holding, candidate: Candidate | None) -> Candidate:
    """It asks for what it held, and is due before all other jobs."""
    if candidate is None:
        first = holding.allocation[0]
        num_nodes = len(holding.allocation)
        request = {"min_nodes": num_nodes, "max_nodes": num_nodes, "cpus": first.cpus,
                   "memory_bytes": first.memory_bytes,
                   "gpus": {"count": len(first.gpu_ids)} if first.gpu_ids else None}  # fmt: skip
        from_holding = {
            "job_id": holding.job_id,
            "project": holding.project,
            "priority": holding.priority,
            "order": 0,
        }
        candidate = msgspec.convert(
            {"attempt_id": holding.attempt_id, "submitted_at": 0.0, "request": request, **from_holding},
            Candidate,
        )
    return msgspec.structs.replace(candidate, attempt_id=f"{holding.attempt_id}+", due_at=0.0)


ROUND = st.tuples(st.sampled_from([1, 2]), st.sampled_from(REQUESTS), st.integers(0, 3))
"""The priority of a new job, what it asks for, and how many jobs end first."""


@given(contested(), st.lists(ROUND, min_size=3, max_size=20), st.integers(0, 3))
def test_no_job_is_evicted_more_often_than_max_evictions(
    snapshot: Snapshot, rounds: list[tuple[int, ResourceRequest, int]], most: int
) -> None:
    """Jobs arrive at any time. Evicted jobs wait again and start over, with nothing saved."""
    planner = Planner.of(snapshot, msgspec.structs.replace(POLICY, max_evictions=most))
    num_evicted = {holding.job_id: holding.num_evicted for holding in snapshot.holdings}
    candidates = {holding.attempt_id: holding for holding in snapshot.candidates}
    now = NOW
    for number, (priority, request, num_ends) in enumerate(rounds, 100):
        urgent = Candidate(
            attempt_id=f"att-{number}", job_id=f"job-{number}", project="vision", priority=priority,
            order=number, submitted_at=now, request=request,
        )  # fmt: skip
        candidates[urgent.attempt_id] = urgent
        planner.add(urgent)
        for holding in sorted(planner.snapshot().holdings, key=lambda holding: -holding.priority)[:num_ends]:
            planner.release(holding.attempt_id, now)
        result = planner.plan(now)
        held = {holding.attempt_id: holding for holding in planner.snapshot().holdings}
        for eviction in result.evictions:
            holding = held[eviction.attempt_id]
            num_evicted[holding.job_id] = num_evicted.get(holding.job_id, 0) + 1
            assert num_evicted[holding.job_id] <= most
            event(f"gave way {num_evicted[holding.job_id]} times")
            resubmitted = _resubmitted(holding, candidates.get(holding.attempt_id))
            resubmitted = msgspec.structs.replace(resubmitted, num_evicted=num_evicted[holding.job_id])
            candidates[resubmitted.attempt_id] = resubmitted
            planner.release(holding.attempt_id, now)
            planner.add(resubmitted)
        planner.plan(now)
        now += 60.0


@given(st.data())
def test_quota_below_a_limit_that_a_sibling_filled_is_served(data: st.DataObject) -> None:
    """The quotas of siblings together are within the limit above them, and there are enough nodes."""
    limit = data.draw(st.integers(2, 12))
    quota = data.draw(st.integers(1, limit))
    rest = data.draw(st.integers(0, limit - quota))
    views = (
        ProjectInfo(name="lab", limit=DeviceAmounts(gpus=limit)),
        ProjectInfo(name="vision", parent="lab", quota=DeviceAmounts(gpus=quota)),
        ProjectInfo(name="speech", parent="lab", quota=DeviceAmounts(gpus=rest)),
    )
    gpus = tuple(GpuInfo(index, "A100") for index in range(4))
    nodes = tuple(NodeInfo(name=f"n{n:02}", cpus=4.0, memory_bytes=64, gpus=gpus) for n in range(16))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=12))
    planner = Planner(POLICY)
    planner.set_projects(views)
    for view in nodes:
        planner.set_node(view)
    for number, size in enumerate(sizes):
        planner.add(_of("speech", number, size))
    planner.plan(NOW)
    head = _of("vision", 99, data.draw(st.integers(1, min(quota, 4))))
    planner.add(head)
    at_once = planner.plan(NOW + 1)
    assert not at_once.evictions
    result = planner.plan(NOW + POLICY.settle_s)
    for eviction in result.evictions:
        event("a limit is taken back")
        planner.release(eviction.attempt_id, NOW + POLICY.settle_s)
    later = planner.plan(NOW + POLICY.settle_s + 1)
    starts = (*at_once.starts, *result.starts, *later.starts)
    assert head.attempt_id in {start.attempt_id for start in starts}


def _of(project: str, number: int, num_gpus: int) -> Candidate:
    return Candidate(
        attempt_id=f"{project}-{number}", job_id=f"{project}-{number}", project=project, priority=-1,
        order=number, submitted_at=NOW, request=_asked(1, num_gpus),
    )  # fmt: skip
