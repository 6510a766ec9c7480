"""What every plan keeps to, whatever the cluster, the holdings and the queue look like."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import combinations
from math import inf
from random import Random
from typing import Any

import msgspec
from hypothesis import event, given
from hypothesis import strategies as st

from shoal.model.attempt import NodeShare
from shoal.model.job import DependencyKind
from shoal.model.request import GpuRequest, Request, TopologyRequest
from shoal.scheduler import (
    Candidate,
    GpuView,
    Holding,
    NodeView,
    Plan,
    Policy,
    Snapshot,
    UnmetDependency,
    Why,
    impossible,
    plan,
)

NOW = 10_000.0


def _devices(*kinds: str) -> tuple[GpuView, ...]:
    return tuple(GpuView(index, kind) for index, kind in enumerate(kinds))


def _view(cpus: float, memory: int, gpus: tuple[GpuView, ...] = ()) -> NodeView:
    return NodeView(name="", cpus=cpus, memory_bytes=memory, disk_bytes=3, gpus=gpus)


A100, H100 = "A100", "H100"
SHAPES = (
    _view(2.0, 16, _devices(A100, A100)),
    _view(2.0, 17, _devices(A100, A100)),
    _view(4.0, 16, _devices(H100, H100, H100, H100)),
    _view(3.3, 10, _devices(A100, H100)),
    _view(4.0, 20),
    _view(0.9, 7),
)
"""Alike enough that jobs get in each other's way, and unlike enough that it matters where they go."""


def _asked(nodes: int = 1, most: int = 1, cpus: float = 1.0, gpus: int = 0, **fields: Any) -> Request:
    kind = fields.pop("kind", None)
    asked = GpuRequest(count=gpus, kind=kind) if gpus else None
    return Request(min_nodes=nodes, max_nodes=max(nodes, most), cpus=cpus, gpus=asked, **fields)


NEAR, NEARBY = TopologyRequest(within="rack"), TopologyRequest(within="rack", is_required=False)
REQUESTS = (
    _asked(),
    _asked(cpus=0.1),
    _asked(cpus=0.57, memory_bytes=2),
    _asked(cpus=0.3, memory_bytes=0, disk_bytes=2, time_limit_s=50.0),
    _asked(gpus=1),
    _asked(gpus=1, cpus=0.3, time_limit_s=500.0),
    _asked(gpus=2, kind=A100, time_limit_s=5000.0),
    _asked(gpus=1, kind=H100),
    _asked(2, cpus=2.0),
    _asked(2, gpus=2),
    _asked(3, gpus=1, time_limit_s=900.0),
    _asked(1, 4, gpus=1),
    _asked(2, 4, cpus=0.57),
    _asked(2, cpus=0.57, topology=NEAR),
    _asked(2, gpus=1, topology=NEAR),
    _asked(2, 3, gpus=1, topology=NEARBY),
    _asked(gpus=4, memory_bytes=16),
    _asked(4, gpus=2),
)


@st.composite
def node_views(draw: st.DrawFn, name: str) -> NodeView:
    return msgspec.structs.replace(
        draw(st.sampled_from(SHAPES)),
        name=name,
        labels=draw(st.sampled_from([{"rack": "r1"}, {"rack": "r2"}, {}])),
        closed_because=draw(st.sampled_from([None, None, None, None, "drained by ana"])),
    )


UNMET = UnmetDependency(label="vision/1", on=DependencyKind.SUCCEEDED)
READY: dict[str, Any] = {}
TWISTS: tuple[dict[str, Any], ...] = (
    *(READY,) * 6,
    {"unmet": (UNMET,)},
    {"not_before": NOW + 9},
    {"excluded_nodes": ("n0",)},
    {"excluded_nodes": ("n0", "n2")},
    {"avoided_nodes": ("n0", "n1")},
    {"array_id": "arr", "array_at_once": 2},
    {"array_id": "arr", "array_at_once": 2},
    {"queue": "night"},
    {"project": "speech"},
)


@st.composite
def candidates(draw: st.DrawFn, number: int, prefix: str) -> Candidate:
    submitted_at = draw(st.sampled_from([0.0, NOW - 1]))
    order = int(submitted_at) * 10 + draw(st.integers(0, 3))
    common = {"project": "vision", "priority": draw(st.integers(-1, 1)), "order": order}
    return Candidate(
        attempt_id=f"{prefix}-{number}",
        job_id=f"job-{prefix}-{number}",
        submitted_at=submitted_at,
        request=draw(st.sampled_from(REQUESTS)),
        **{**common, **draw(st.sampled_from(TWISTS))},
    )


NUM_NODES = st.sampled_from([0, 1, 2, 3, 4, 4, 5, 5])
POLICIES = st.builds(Policy, patience_s=st.sampled_from([0.0, 600.0, inf]))


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Holdings come from a plan of their own, so that they are such as a cluster can have."""
    views = tuple(draw(node_views(f"n{number}")) for number in range(draw(NUM_NODES)))
    earlier = tuple(draw(candidates(number, "held")) for number in range(draw(st.integers(0, 6))))
    first = plan(Snapshot(nodes=views, holdings=(), candidates=earlier), Policy(), NOW)
    by_id = {candidate.attempt_id: candidate for candidate in earlier}
    holdings = tuple(_held(by_id[start.attempt_id], start.allocation) for start in first.starts)
    waiting = tuple(draw(candidates(number, "new")) for number in range(draw(st.integers(1, 9))))
    return Snapshot(nodes=views, holdings=holdings, candidates=waiting)


def _held(candidate: Candidate, allocation: tuple[NodeShare, ...]) -> Holding:
    return Holding(
        attempt_id=candidate.attempt_id,
        job_id=candidate.job_id,
        project=candidate.project,
        priority=candidate.priority,
        allocation=allocation,
        placed_at=NOW - 100,
        time_limit_s=candidate.request.time_limit_s,
        array_id=candidate.array_id,
    )


def shares_after(snapshot: Snapshot, told: Plan) -> list[NodeShare]:
    held = [share for holding in snapshot.holdings for share in holding.allocation]
    return held + [share for start in told.starts for share in start.allocation]


def _place(candidate: Candidate) -> tuple[int, float, int, str]:
    """Who comes first, where nobody was told when they are due."""
    return -candidate.priority, candidate.submitted_at, candidate.order, candidate.attempt_id


def exact(cpus: float) -> Fraction:
    return Fraction(str(cpus))


def can_give(view: NodeView, asked: Request, used: list[NodeShare]) -> bool:
    """Whether a node can give a request next to what is used, in exact arithmetic and step by step."""
    here = [share for share in used if share.node == view.name]
    taken = {index for share in here for index in share.gpu_ids}
    kind = asked.gpus.kind if asked.gpus else None
    count = asked.gpus.count if asked.gpus else 0
    free = [g for g in view.gpus if g.index not in taken and kind in (None, g.kind)]
    gpu_share = Fraction(count, len(view.gpus)) if view.gpus else Fraction(0)
    memory = asked.memory_bytes
    if memory is None:
        memory = int(view.memory_bytes * max(exact(asked.cpus) / exact(view.cpus), gpu_share))
    return (
        count <= len(free)
        and exact(asked.cpus) + sum(exact(share.cpus) for share in here) <= exact(view.cpus)
        and memory + sum(share.memory_bytes for share in here) <= view.memory_bytes
        and asked.disk_bytes + sum(share.disk_bytes for share in here) <= view.disk_bytes
    )


def could_run(asked: Request, views: list[NodeView], used: list[NodeShare]) -> bool:
    """By trying every set of nodes."""
    able = [view for view in views if can_give(view, asked, used)]
    gangs = combinations(able, asked.min_nodes)
    if asked.topology is None or not asked.topology.is_required:
        return any(True for _ in gangs)
    label = asked.topology.within or ""
    racks = ({view.labels.get(label) for view in gang} for gang in gangs)
    return any(len(rack) == 1 and None not in rack for rack in racks)


@given(snapshots(), POLICIES)
def test_no_node_is_over_committed(snapshot: Snapshot, policy: Policy) -> None:
    used = shares_after(snapshot, plan(snapshot, policy, NOW))
    for view in snapshot.nodes:
        here = [share for share in used if share.node == view.name]
        assert sum(exact(share.cpus) for share in here) <= exact(view.cpus)
        assert sum(share.memory_bytes for share in here) <= view.memory_bytes
        assert sum(share.disk_bytes for share in here) <= view.disk_bytes
        used_milli: Counter[int] = Counter()
        for share in here:
            used_milli.update(dict.fromkeys(share.gpu_ids, share.gpu_milli))
        assert all(milli <= 1000 for milli in used_milli.values())
        assert set(used_milli) <= {gpu.index for gpu in view.gpus}


@given(snapshots(), POLICIES)
def test_gangs_start_whole_and_with_all_they_asked_for(snapshot: Snapshot, policy: Policy) -> None:
    by_id = {candidate.attempt_id: candidate for candidate in snapshot.candidates}
    views = {view.name: view for view in snapshot.nodes}
    for start in plan(snapshot, policy, NOW).starts:
        candidate = by_id[start.attempt_id]
        asked = candidate.request
        names = [share.node for share in start.allocation]
        assert asked.min_nodes <= len(set(names)) == len(names) <= asked.max_nodes
        for share in start.allocation:
            kinds = [gpu.kind for gpu in views[share.node].gpus if gpu.index in share.gpu_ids]
            assert share.cpus >= asked.cpus
            assert share.memory_bytes >= (asked.memory_bytes or 0)
            assert len(kinds) == (asked.gpus.count if asked.gpus else 0)
            assert asked.gpus is None or asked.gpus.kind is None or set(kinds) == {asked.gpus.kind}
        if asked.topology and asked.topology.is_required:
            assert len({views[name].labels["rack"] for name in names}) == 1


@given(snapshots(), POLICIES)
def test_closed_and_excluded_nodes_are_never_used(snapshot: Snapshot, policy: Policy) -> None:
    by_id = {candidate.attempt_id: candidate for candidate in snapshot.candidates}
    closed = {view.name for view in snapshot.nodes if view.closed_because is not None}
    for start in plan(snapshot, policy, NOW).starts:
        names = {share.node for share in start.allocation}
        assert not names & closed
        assert not names & set(by_id[start.attempt_id].excluded_nodes)


@given(snapshots(), POLICIES)
def test_every_candidate_starts_or_is_explained_once(snapshot: Snapshot, policy: Policy) -> None:
    told = plan(snapshot, policy, NOW)
    answered = [start.attempt_id for start in told.starts]
    answered += [said.attempt_id for said in told.explanations]
    assert Counter(answered) == Counter(candidate.attempt_id for candidate in snapshot.candidates)
    for said in told.explanations:
        event(said.why)
        assert said.sentence
        msgspec.json.encode(said)


@given(snapshots(), POLICIES, st.randoms(use_true_random=False))
def test_the_order_of_the_tuples_does_not_show_in_the_plan(
    snapshot: Snapshot, policy: Policy, random: Random
) -> None:
    parts = {name: list(getattr(snapshot, name)) for name in ("nodes", "holdings", "candidates")}
    for items in parts.values():
        random.shuffle(items)
    shuffled = Snapshot(**{name: tuple(items) for name, items in parts.items()})
    assert plan(shuffled, policy, NOW) == plan(snapshot, policy, NOW)


@given(snapshots(), POLICIES)
def test_the_same_snapshot_gives_the_same_plan_and_stays_as_it_was(
    snapshot: Snapshot, policy: Policy
) -> None:
    before = msgspec.json.encode(snapshot)
    first = plan(snapshot, policy, NOW)
    assert plan(msgspec.json.decode(before, type=Snapshot), policy, NOW) == first
    assert msgspec.json.encode(snapshot) == before


@given(snapshots(), POLICIES)
def test_nobody_waits_behind_a_lower_priority(snapshot: Snapshot, policy: Policy) -> None:
    by_job = {candidate.job_id: candidate for candidate in snapshot.candidates}
    for said in plan(snapshot, policy, NOW).explanations:
        if said.why is Why.BEHIND and said.facts["behind_job_id"] is not None:
            head, waiting = by_job[said.facts["behind_job_id"]], by_job[said.job_id]
            assert head is not waiting
            # Equal ones of two queues go queue by queue; of one queue, by their ids.
            assert _place(head)[:-1] <= _place(waiting)[:-1]
            assert head.project == waiting.project


@given(snapshots(), POLICIES)
def test_never_means_never_and_not_now_means_not_now(snapshot: Snapshot, policy: Policy) -> None:
    told = plan(snapshot, policy, NOW)
    used = shares_after(snapshot, told)
    by_id = {candidate.attempt_id: candidate for candidate in snapshot.candidates}
    views = list(snapshot.nodes)
    for said in told.explanations:
        candidate = by_id[said.attempt_id]
        asked = candidate.request
        allowed = [view for view in views if view.name not in candidate.excluded_nodes]
        is_open = [view for view in allowed if view.closed_because is None]
        runs_ever = could_run(asked, views, [])
        runs_allowed = could_run(asked, allowed, [])
        runs_open = could_run(asked, is_open, [])
        runs_now = could_run(asked, is_open, used)
        if said.why is Why.NEVER_FITS:
            assert not runs_ever
        elif said.why is Why.NODES_EXCLUDED:
            assert (runs_ever, runs_allowed) == (True, False)
        elif said.why is Why.NODES_CLOSED:
            assert (runs_allowed, runs_open) == (True, False)
        elif said.why in {Why.RESOURCES, Why.TOPOLOGY}:
            assert (runs_open, runs_now) == (True, False)
        elif said.why is Why.BEHIND:
            assert runs_now


@given(snapshots())
def test_what_is_refused_at_submit_is_exactly_what_no_empty_cluster_holds(snapshot: Snapshot) -> None:
    views = list(snapshot.nodes)
    for candidate in snapshot.candidates:
        said = impossible(candidate.request, views)
        assert (said is not None) == (bool(views) and not could_run(candidate.request, views, []))
        assert said is None or said.why is Why.NEVER_FITS


@given(snapshots())
def test_the_first_in_line_always_starts_when_it_fits(snapshot: Snapshot) -> None:
    ready = [
        msgspec.structs.replace(c, project="vision")
        for c in snapshot.candidates
        if not c.unmet and c.not_before <= NOW and c.array_id is None
    ]
    told = plan(msgspec.structs.replace(snapshot, candidates=tuple(ready)), Policy(), NOW)
    first = min(ready, key=_place, default=None)
    if first is not None:
        views = [
            view
            for view in snapshot.nodes
            if view.closed_because is None and view.name not in first.excluded_nodes
        ]
        held = [share for holding in snapshot.holdings for share in holding.allocation]
        has_started = bool(told.starts) and told.starts[0].attempt_id == first.attempt_id
        assert has_started == could_run(first.request, views, held)


@given(snapshots(), POLICIES)
def test_arrays_stay_within_their_limit(snapshot: Snapshot, policy: Policy) -> None:
    started = {start.attempt_id for start in plan(snapshot, policy, NOW).starts}
    held = sum(holding.array_id == "arr" for holding in snapshot.holdings)
    new = sum(c.array_id == "arr" and c.attempt_id in started for c in snapshot.candidates)
    assert held + new <= max(held, 2)


def naive_starts(snapshot: Snapshot) -> dict[str, list[str]]:
    """First come, first served over every node, for gangs without topology: slow and obvious."""
    used = [share for holding in snapshot.holdings for share in holding.allocation]
    started: dict[str, list[str]] = {}
    for candidate in sorted(snapshot.candidates, key=_place):
        asked = candidate.request
        able = [
            view
            for view in snapshot.nodes
            if view.closed_because is None
            and view.name not in candidate.excluded_nodes
            and can_give(view, asked, used)
        ]
        elsewhere = [view for view in able if view.name not in candidate.avoided_nodes]
        best = elsewhere if len(elsewhere) >= asked.min_nodes else able
        chosen = sorted(best, key=lambda view: (*_left_over(view, used), view.name))[: asked.max_nodes]
        if len(chosen) >= asked.min_nodes:
            started[candidate.attempt_id] = [view.name for view in chosen]
            used += [_naive_share(view, asked, used) for view in chosen]
    return started


def _left_over(view: NodeView, used: list[NodeShare]) -> tuple[int, Fraction]:
    here = [share for share in used if share.node == view.name]
    num_gpus = len(view.gpus) - sum(len(share.gpu_ids) for share in here)
    return num_gpus, exact(view.cpus) - sum(exact(share.cpus) for share in here)


def _naive_share(view: NodeView, asked: Request, used: list[NodeShare]) -> NodeShare:
    taken = {index for share in used if share.node == view.name for index in share.gpu_ids}
    kind, count = (asked.gpus.kind, asked.gpus.count) if asked.gpus else (None, 0)
    free = [gpu.index for gpu in view.gpus if gpu.index not in taken and kind in (None, gpu.kind)]
    gpu_share = Fraction(count, len(view.gpus)) if view.gpus else Fraction(0)
    by_share = int(view.memory_bytes * max(exact(asked.cpus) / exact(view.cpus), gpu_share))
    return NodeShare(
        node=view.name,
        cpus=asked.cpus,
        memory_bytes=by_share if asked.memory_bytes is None else asked.memory_bytes,
        disk_bytes=asked.disk_bytes,
        gpu_ids=tuple(free[:count]),
    )


def _without_limit(asked: Request) -> Request:
    """No time can be promised then, and nobody is kept from starting."""
    return msgspec.structs.replace(asked, topology=None, time_limit_s=None)


@given(snapshots())
def test_plans_are_those_of_a_slow_and_obvious_scheduler(snapshot: Snapshot) -> None:
    plain = [
        msgspec.structs.replace(c, request=_without_limit(c.request), project="vision", queue="default")
        for c in snapshot.candidates
        if not c.unmet and c.not_before <= NOW and c.array_id is None
    ]
    holdings = [msgspec.structs.replace(held, time_limit_s=None) for held in snapshot.holdings]
    snapshot = msgspec.structs.replace(snapshot, candidates=tuple(plain), holdings=tuple(holdings))
    told = plan(snapshot, Policy(patience_s=inf), NOW)
    nodes = {start.attempt_id: [share.node for share in start.allocation] for start in told.starts}
    assert nodes == naive_starts(snapshot)
