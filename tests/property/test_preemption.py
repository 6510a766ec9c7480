"""What every eviction keeps to, whatever runs and whoever waits."""

from __future__ import annotations

from math import inf
from typing import Any

import msgspec
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from shoal.model.people import Devices
from shoal.model.request import GpuRequest, Request, TopologyRequest
from shoal.scheduler import (
    Candidate,
    Eviction,
    GpuView,
    Ground,
    Holding,
    NodeView,
    Plan,
    Planner,
    Policy,
    Snapshot,
    offers,
    plan,
)
from shoal.scheduler.amounts import demand_of
from shoal.scheduler.classes import PriorityClass
from shoal.scheduler.devices import ProjectView, asked_by, held_by
from shoal.scheduler.loss import RESTART_S, lost
from shoal.scheduler.tree import Tree

NOW = 10_000.0


def _asked(nodes: int, gpus: int, **fields: Any) -> Request:
    asked = GpuRequest(count=gpus, kind=None) if gpus else None
    return Request(min_nodes=nodes, max_nodes=nodes, cpus=1.0, gpus=asked, **fields)


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
    st.none(), st.builds(Devices, gpus=st.integers(0, 9), cpus=st.sampled_from([None, 2.0, 9.0]))
)
PARENTS = ((None, None), ("lab", "lab"), (None, "vision"))
LIMITS = st.one_of(st.none(), st.none(), st.builds(Devices, gpus=st.integers(1, 12)))
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
    """A small cluster, as full as it gets, in two projects with quotas or without."""
    gpus = tuple(GpuView(index, "A100") for index in range(4))
    racks = draw(st.lists(st.sampled_from(["r1", "r2"]), min_size=1, max_size=4))
    views = tuple(
        NodeView(name=f"n{number}", cpus=4.0, memory_bytes=64, gpus=gpus, labels={"rack": rack})
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
            one,
            placed_at=NOW - draw(st.sampled_from([0.0, 100.0, 5000.0])),
            checkpoint_at=draw(st.sampled_from([None, NOW - 5.0, NOW - 90.0])),
            is_leaving=draw(st.sampled_from([False] * 7 + [True])),
            num_evicted=draw(st.sampled_from([0, 0, 0, 4, 5])),
        )
        for one in first.snapshot().holdings
    )
    waiting = tuple(draw(jobs(number, WAITING)) for number in range(20, 20 + draw(st.integers(1, 6))))
    projects = tuple(
        ProjectView(name=name, parent=parent, quota=draw(QUOTAS), limit=draw(LIMITS))
        for name, parent in zip(("vision", "speech"), draw(st.sampled_from(PARENTS)), strict=True)
    )
    above = tuple(
        ProjectView(name="lab", quota=draw(QUOTAS), limit=draw(LIMITS)) for one in projects[:1] if one.parent
    )
    return Snapshot(nodes=views, holdings=holdings, candidates=waiting, projects=(*projects, *above))


def by_head(told: Plan) -> dict[str, list[Eviction]]:
    heads: dict[str, list[Eviction]] = {}
    for eviction in told.evictions:
        heads.setdefault(eviction.for_attempt_id, []).append(eviction)
    return heads


def starts_without(snapshot: Snapshot, head: Candidate, gone: set[str]) -> bool:
    """Whether it starts at once where nobody else waits and those do not run."""
    left = tuple(one for one in snapshot.holdings if one.attempt_id not in gone)
    alone = msgspec.structs.replace(snapshot, holdings=left, candidates=(head,))
    return bool(plan(alone, POLICY, NOW).starts)


@given(contested(), st.booleans())
def test_who_stops_is_enough_and_nobody_of_them_could_be_spared(snapshot: Snapshot, is_rough: bool) -> None:
    """For one head alone: others who wait may be in its way for good reason.

    Rough: as where so much was looked at already that whole nodes are emptied first.
    """
    with pytest.MonkeyPatch.context() as patch:
        if is_rough:
            patch.setattr(offers, "NUM_SETS", 0)
        _check_each_alone(snapshot)


def _check_each_alone(snapshot: Snapshot) -> None:
    leaving = {one.attempt_id for one in snapshot.holdings if one.is_leaving}
    for head in snapshot.candidates:
        alone = msgspec.structs.replace(snapshot, candidates=(head,))
        stops = {eviction.attempt_id for eviction in plan(alone, POLICY, NOW).evictions}
        if not stops:
            continue
        event("somebody is evicted")
        assert starts_without(snapshot, head, leaving | stops)
        for one in stops:
            assert not starts_without(snapshot, head, leaving | stops - {one})


@given(contested())
def test_everybody_has_a_bill_and_it_says_all_that_is_lost(snapshot: Snapshot) -> None:
    told = plan(snapshot, POLICY, NOW)
    held = {one.attempt_id: one for one in snapshot.holdings}
    ids = [eviction.attempt_id for eviction in told.evictions]
    assert len(set(ids)) == len(ids)
    for eviction in told.evictions:
        victim = held[eviction.attempt_id]
        assert not victim.is_leaving
        assert eviction.lost_device_s == lost(victim, NOW) > 0
        assert eviction.lost_s >= NOW - victim.placed_at + RESTART_S or victim.checkpoint_at is not None
        assert 0 < eviction.likely_device_s <= eviction.lost_device_s
        if victim.checkpoint_at is not None:
            assert eviction.likely_device_s == eviction.lost_device_s
        assert eviction.for_attempt_id not in {start.attempt_id for start in told.starts}


@given(contested())
def test_nobody_is_evicted_without_a_right_to_it(snapshot: Snapshot) -> None:
    told = plan(snapshot, POLICY, NOW)
    held = {one.attempt_id: one for one in snapshot.holdings}
    waiting = {one.attempt_id: one for one in snapshot.candidates}
    for eviction in told.evictions:
        victim, head = held[eviction.attempt_id], waiting[eviction.for_attempt_id]
        assert victim.priority != 0, "a class that is not preemptible"
        assert victim.num_evicted < POLICY.max_evictions
        if eviction.ground is Ground.PRIORITY:
            assert head.priority > victim.priority
            assert head.priority >= 1
        else:
            event("something is taken back")
            assert head.priority >= victim.priority
            assert head.project != victim.project


def _tree(snapshot: Snapshot, without: set[str]) -> Tree:
    tree = Tree(snapshot.projects)
    for one in snapshot.holdings:
        if one.attempt_id not in without and not one.is_leaving:
            tree.take(one.project, held_by(one.allocation))
    return tree


@given(contested())
def test_quotas_hold_when_all_of_it_is_done(snapshot: Snapshot) -> None:
    """Who takes back stays within a quota, and the last of those who give was above theirs until then."""
    told = plan(snapshot, POLICY, NOW)
    waiting = {one.attempt_id: one for one in snapshot.candidates}
    held = {one.attempt_id: one for one in snapshot.holdings}
    for head_id, evictions in by_head(told).items():
        head = waiting[head_id]
        reclaimed = [eviction.attempt_id for eviction in evictions if eviction.ground is Ground.QUOTA]
        asked = asked_by(demand_of(head.request))
        if reclaimed:
            after = _tree(snapshot, {eviction.attempt_id for eviction in told.evictions})
            assert any(after.covered(head.project, asked))
        above = {view.name for view in Tree(snapshot.projects).line(head.project)}
        # A parent's own jobs have no quota against that of a child: all that they hold may be taken back.
        for project in {held[one].project for one in reclaimed} - above:
            largest = max((held[o] for o in reclaimed if held[o].project == project), key=_size)
            before = _tree(snapshot, {one for one in reclaimed if one != largest.attempt_id})
            over = before.over_quota(project)
            assert over.milligpus > 0 if asked.milligpus else over.millicpus > 0


def _size(one: Holding) -> tuple[object, str]:
    return held_by(one.allocation), one.attempt_id


@given(contested())
def test_evictions_come_to_an_end(snapshot: Snapshot) -> None:
    """Whoever stops waits again, and nothing else happens: soon nobody is evicted any more."""
    planner = Planner.of(snapshot, POLICY)
    asked = {one.attempt_id: one for one in snapshot.candidates}
    now, rounds = NOW, 0
    while True:
        told = planner.plan(now)
        if not told.evictions:
            break
        rounds += 1
        assert rounds <= len(snapshot.holdings) + len(snapshot.candidates), "back and forth"
        held = {one.attempt_id: one for one in planner.snapshot().holdings}
        for eviction in told.evictions:
            planner.release(eviction.attempt_id, now)
            again = _again(held[eviction.attempt_id], asked.get(eviction.attempt_id))
            planner.add(again)
            asked[again.attempt_id] = again
        now += 1.0
    event(f"{rounds} rounds")


def _again(one: Holding, was: Candidate | None) -> Candidate:
    """Asks for what it held, due before everybody else."""
    if was is None:
        first = one.allocation[0]
        request = {"min_nodes": len(one.allocation), "max_nodes": len(one.allocation), "cpus": first.cpus,
                   "memory_bytes": first.memory_bytes,
                   "gpus": {"count": len(first.gpu_ids)} if first.gpu_ids else None}  # fmt: skip
        from_holding = {"job_id": one.job_id, "project": one.project, "priority": one.priority, "order": 0}
        was = msgspec.convert(
            {"attempt_id": one.attempt_id, "submitted_at": 0.0, "request": request, **from_holding}, Candidate
        )
    return msgspec.structs.replace(was, attempt_id=f"{one.attempt_id}+", due_at=0.0)


ROUND = st.tuples(st.sampled_from([1, 2]), st.sampled_from(REQUESTS), st.integers(0, 3))
"""The priority of one who comes, what it asks for, and how many end first."""


@given(contested(), st.lists(ROUND, min_size=3, max_size=20), st.integers(0, 3))
def test_nobody_gives_way_more_often_than_the_policy_says(
    snapshot: Snapshot, rounds: list[tuple[int, Request, int]], most: int
) -> None:
    """Whoever comes, and whenever: those who stop wait again and begin anew, with nothing saved."""
    planner = Planner.of(snapshot, msgspec.structs.replace(POLICY, max_evictions=most))
    gave_way = {one.job_id: one.num_evicted for one in snapshot.holdings}
    asked = {one.attempt_id: one for one in snapshot.candidates}
    now = NOW
    for number, (priority, request, num_ends) in enumerate(rounds, 100):
        urgent = Candidate(
            attempt_id=f"att-{number}", job_id=f"job-{number}", project="vision", priority=priority,
            order=number, submitted_at=now, request=request,
        )  # fmt: skip
        asked[urgent.attempt_id] = urgent
        planner.add(urgent)
        for one in sorted(planner.snapshot().holdings, key=lambda one: -one.priority)[:num_ends]:
            planner.release(one.attempt_id, now)
        told = planner.plan(now)
        held = {one.attempt_id: one for one in planner.snapshot().holdings}
        for eviction in told.evictions:
            one = held[eviction.attempt_id]
            gave_way[one.job_id] = gave_way.get(one.job_id, 0) + 1
            assert gave_way[one.job_id] <= most
            event(f"gave way {gave_way[one.job_id]} times")
            again = _again(one, asked.get(one.attempt_id))
            again = msgspec.structs.replace(again, num_evicted=gave_way[one.job_id])
            asked[again.attempt_id] = again
            planner.release(one.attempt_id, now)
            planner.add(again)
        planner.plan(now)
        now += 60.0


@given(st.data())
def test_quota_below_a_limit_that_a_sibling_filled_is_served(data: st.DataObject) -> None:
    """Quotas of siblings together are within the limit above them; nodes there are enough."""
    limit = data.draw(st.integers(2, 12))
    quota = data.draw(st.integers(1, limit))
    rest = data.draw(st.integers(0, limit - quota))
    views = (
        ProjectView(name="lab", limit=Devices(gpus=limit)),
        ProjectView(name="vision", parent="lab", quota=Devices(gpus=quota)),
        ProjectView(name="speech", parent="lab", quota=Devices(gpus=rest)),
    )
    gpus = tuple(GpuView(index, "A100") for index in range(4))
    nodes = tuple(NodeView(name=f"n{n:02}", cpus=4.0, memory_bytes=64, gpus=gpus) for n in range(16))
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
    told = planner.plan(NOW + POLICY.settle_s)
    for eviction in told.evictions:
        event("a limit is taken back")
        planner.release(eviction.attempt_id, NOW + POLICY.settle_s)
    later = planner.plan(NOW + POLICY.settle_s + 1)
    starts = (*at_once.starts, *told.starts, *later.starts)
    assert head.attempt_id in {start.attempt_id for start in starts}


def _of(project: str, number: int, num_gpus: int) -> Candidate:
    return Candidate(
        attempt_id=f"{project}-{number}", job_id=f"{project}-{number}", project=project, priority=-1,
        order=number, submitted_at=NOW, request=_asked(1, num_gpus),
    )  # fmt: skip
