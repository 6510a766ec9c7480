"""Invariants of every plan, whatever the cluster, the holdings and the queue look like."""

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

from shoal.model.attempt import NodeTask
from shoal.model.job import DependencyKind, GpuRequest, ResourceRequest, TopologyRequest
from shoal.scheduler import (
    Candidate,
    GpuInfo,
    Holding,
    NodeInfo,
    Plan,
    Policy,
    Snapshot,
    UnmetDependency,
    WaitReason,
    explain_impossible,
    plan,
)

NOW = 10_000.0


def _devices(*kinds: str) -> tuple[GpuInfo, ...]:
    return tuple(GpuInfo(index, kind) for index, kind in enumerate(kinds))


def _view(cpus: float, memory: int, gpus: tuple[GpuInfo, ...] = ()) -> NodeInfo:
    return NodeInfo(name="", cpus=cpus, memory_bytes=memory, disk_bytes=3, gpus=gpus)


A100, H100 = "A100", "H100"
SHAPES = (
    _view(2.0, 16, _devices(A100, A100)),
    _view(2.0, 17, _devices(A100, A100)),
    _view(4.0, 16, _devices(H100, H100, H100, H100)),
    _view(3.3, 10, _devices(A100, H100)),
    _view(4.0, 20),
    _view(0.9, 7),
)
"""Similar enough that jobs compete for nodes, and different enough that placement matters."""


def _asked(nodes: int = 1, most: int = 1, cpus: float = 1.0, gpus: int = 0, **fields: Any) -> ResourceRequest:
    kind = fields.pop("kind", None)
    gpu_request = GpuRequest(count=gpus, kind=kind) if gpus else None
    return ResourceRequest(min_nodes=nodes, max_nodes=max(nodes, most), cpus=cpus, gpus=gpu_request, **fields)


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
def node_views(draw: st.DrawFn, name: str) -> NodeInfo:
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
    """Make holdings with a plan of their own, so that a cluster could really have them."""
    views = tuple(draw(node_views(f"n{number}")) for number in range(draw(NUM_NODES)))
    earlier = tuple(draw(candidates(number, "held")) for number in range(draw(st.integers(0, 6))))
    first = plan(Snapshot(nodes=views, holdings=(), candidates=earlier), Policy(), NOW)
    by_id = {candidate.attempt_id: candidate for candidate in earlier}
    holdings = tuple(_held(by_id[start.attempt_id], start.allocation) for start in first.starts)
    waiting = tuple(draw(candidates(number, "new")) for number in range(draw(st.integers(1, 9))))
    return Snapshot(nodes=views, holdings=holdings, candidates=waiting)


def _held(candidate: Candidate, allocation: tuple[NodeTask, ...]) -> Holding:
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


def tasks_after(snapshot: Snapshot, result: Plan) -> list[NodeTask]:
    held = [task for holding in snapshot.holdings for task in holding.allocation]
    return held + [task for start in result.starts for task in start.allocation]


def _order_key(candidate: Candidate) -> tuple[int, float, int, str]:
    """Return the order of candidates without due times."""
    return -candidate.priority, candidate.submitted_at, candidate.order, candidate.attempt_id


def exact(cpus: float) -> Fraction:
    return Fraction(str(cpus))


def can_give(view: NodeInfo, wanted: ResourceRequest, used: list[NodeTask]) -> bool:
    """Whether a node can give a request next to what is used, in exact arithmetic and step by step."""
    on_node = [task for task in used if task.node == view.name]
    gpus_in_use = {index for task in on_node for index in task.gpu_ids}
    kind = wanted.gpus.kind if wanted.gpus else None
    count = wanted.gpus.count if wanted.gpus else 0
    free = [g for g in view.gpus if g.index not in gpus_in_use and kind in (None, g.kind)]
    gpu_share = Fraction(count, len(view.gpus)) if view.gpus else Fraction(0)
    memory = wanted.memory_bytes
    if memory is None:
        memory = int(view.memory_bytes * max(exact(wanted.cpus) / exact(view.cpus), gpu_share))
    return (
        count <= len(free)
        and exact(wanted.cpus) + sum(exact(task.cpus) for task in on_node) <= exact(view.cpus)
        and memory + sum(task.memory_bytes for task in on_node) <= view.memory_bytes
        and wanted.disk_bytes + sum(task.disk_bytes for task in on_node) <= view.disk_bytes
    )


def could_run(wanted: ResourceRequest, views: list[NodeInfo], used: list[NodeTask]) -> bool:
    """Try every set of nodes."""
    suitable = [view for view in views if can_give(view, wanted, used)]
    gangs = combinations(suitable, wanted.min_nodes)
    if wanted.topology is None or not wanted.topology.is_required:
        return any(True for _ in gangs)
    label = wanted.topology.within or ""
    racks = ({view.labels.get(label) for view in gang} for gang in gangs)
    return any(len(rack) == 1 and None not in rack for rack in racks)


@given(snapshots(), POLICIES)
def test_no_node_is_over_committed(snapshot: Snapshot, policy: Policy) -> None:
    used = tasks_after(snapshot, plan(snapshot, policy, NOW))
    for view in snapshot.nodes:
        on_node = [task for task in used if task.node == view.name]
        assert sum(exact(task.cpus) for task in on_node) <= exact(view.cpus)
        assert sum(task.memory_bytes for task in on_node) <= view.memory_bytes
        assert sum(task.disk_bytes for task in on_node) <= view.disk_bytes
        used_milli: Counter[int] = Counter()
        for task in on_node:
            used_milli.update(dict.fromkeys(task.gpu_ids, task.gpu_milli))
        assert all(milli <= 1000 for milli in used_milli.values())
        assert set(used_milli) <= {gpu.index for gpu in view.gpus}


@given(snapshots(), POLICIES)
def test_gangs_start_whole_and_with_all_they_asked_for(snapshot: Snapshot, policy: Policy) -> None:
    by_id = {candidate.attempt_id: candidate for candidate in snapshot.candidates}
    views = {view.name: view for view in snapshot.nodes}
    for start in plan(snapshot, policy, NOW).starts:
        candidate = by_id[start.attempt_id]
        wanted = candidate.request
        names = [task.node for task in start.allocation]
        assert wanted.min_nodes <= len(set(names)) == len(names) <= wanted.max_nodes
        for task in start.allocation:
            kinds = [gpu.kind for gpu in views[task.node].gpus if gpu.index in task.gpu_ids]
            assert task.cpus >= wanted.cpus
            assert task.memory_bytes >= (wanted.memory_bytes or 0)
            assert len(kinds) == (wanted.gpus.count if wanted.gpus else 0)
            assert wanted.gpus is None or wanted.gpus.kind is None or set(kinds) == {wanted.gpus.kind}
        if wanted.topology and wanted.topology.is_required:
            assert len({views[name].labels["rack"] for name in names}) == 1


@given(snapshots(), POLICIES)
def test_closed_and_excluded_nodes_are_never_used(snapshot: Snapshot, policy: Policy) -> None:
    by_id = {candidate.attempt_id: candidate for candidate in snapshot.candidates}
    closed = {view.name for view in snapshot.nodes if view.closed_because is not None}
    for start in plan(snapshot, policy, NOW).starts:
        names = {task.node for task in start.allocation}
        assert not names & closed
        assert not names & set(by_id[start.attempt_id].excluded_nodes)


@given(snapshots(), POLICIES)
def test_every_candidate_starts_or_is_explained_once(snapshot: Snapshot, policy: Policy) -> None:
    result = plan(snapshot, policy, NOW)
    answered = [start.attempt_id for start in result.starts]
    answered += [explanation.attempt_id for explanation in result.explanations]
    assert Counter(answered) == Counter(candidate.attempt_id for candidate in snapshot.candidates)
    for explanation in result.explanations:
        event(explanation.why)
        assert explanation.sentence
        msgspec.json.encode(explanation)


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
def test_no_job_waits_behind_a_lower_priority(snapshot: Snapshot, policy: Policy) -> None:
    by_job = {candidate.job_id: candidate for candidate in snapshot.candidates}
    for result in plan(snapshot, policy, NOW).explanations:
        if result.why is WaitReason.BEHIND and result.facts["behind_job_id"] is not None:
            head, waiting = by_job[result.facts["behind_job_id"]], by_job[result.job_id]
            assert head is not waiting
            # Equal jobs of two queues start queue by queue; within a queue, by their ids.
            assert _order_key(head)[:-1] <= _order_key(waiting)[:-1]
            assert head.project == waiting.project


@given(snapshots(), POLICIES)
def test_never_fits_and_resources_explanations_are_true(snapshot: Snapshot, policy: Policy) -> None:
    result = plan(snapshot, policy, NOW)
    used = tasks_after(snapshot, result)
    by_id = {candidate.attempt_id: candidate for candidate in snapshot.candidates}
    views = list(snapshot.nodes)
    for explanation in result.explanations:
        candidate = by_id[explanation.attempt_id]
        wanted = candidate.request
        allowed = [view for view in views if view.name not in candidate.excluded_nodes]
        is_open = [view for view in allowed if view.closed_because is None]
        runs_ever = could_run(wanted, views, [])
        runs_allowed = could_run(wanted, allowed, [])
        runs_open = could_run(wanted, is_open, [])
        runs_now = could_run(wanted, is_open, used)
        if explanation.why is WaitReason.NEVER_FITS:
            assert not runs_ever
        elif explanation.why is WaitReason.NODES_EXCLUDED:
            assert (runs_ever, runs_allowed) == (True, False)
        elif explanation.why is WaitReason.NODES_CLOSED:
            assert (runs_allowed, runs_open) == (True, False)
        elif explanation.why in {WaitReason.RESOURCES, WaitReason.TOPOLOGY}:
            assert (runs_open, runs_now) == (True, False)
        elif explanation.why is WaitReason.BEHIND:
            assert runs_now


@given(snapshots())
def test_submit_refuses_exactly_the_requests_that_no_empty_cluster_holds(snapshot: Snapshot) -> None:
    views = list(snapshot.nodes)
    for candidate in snapshot.candidates:
        explanation = explain_impossible(candidate.request, views)
        assert (explanation is not None) == (bool(views) and not could_run(candidate.request, views, []))
        assert explanation is None or explanation.why is WaitReason.NEVER_FITS


@given(snapshots())
def test_the_first_in_line_always_starts_when_it_fits(snapshot: Snapshot) -> None:
    ready = [
        msgspec.structs.replace(c, project="vision")
        for c in snapshot.candidates
        if not c.unmet and c.not_before <= NOW and c.array_id is None
    ]
    result = plan(msgspec.structs.replace(snapshot, candidates=tuple(ready)), Policy(), NOW)
    first = min(ready, key=_order_key, default=None)
    if first is not None:
        views = [
            view
            for view in snapshot.nodes
            if view.closed_because is None and view.name not in first.excluded_nodes
        ]
        held = [task for holding in snapshot.holdings for task in holding.allocation]
        has_started = bool(result.starts) and result.starts[0].attempt_id == first.attempt_id
        assert has_started == could_run(first.request, views, held)


@given(snapshots(), POLICIES)
def test_arrays_stay_within_their_limit(snapshot: Snapshot, policy: Policy) -> None:
    started = {start.attempt_id for start in plan(snapshot, policy, NOW).starts}
    held = sum(holding.array_id == "arr" for holding in snapshot.holdings)
    new = sum(c.array_id == "arr" and c.attempt_id in started for c in snapshot.candidates)
    assert held + new <= max(held, 2)


def naive_starts(snapshot: Snapshot) -> dict[str, list[str]]:
    """First come, first served over all nodes, for gangs without topology: slow and obvious."""
    used = [task for holding in snapshot.holdings for task in holding.allocation]
    started: dict[str, list[str]] = {}
    for candidate in sorted(snapshot.candidates, key=_order_key):
        wanted = candidate.request
        suitable = [
            view
            for view in snapshot.nodes
            if view.closed_because is None
            and view.name not in candidate.excluded_nodes
            and can_give(view, wanted, used)
        ]
        unavoided = [view for view in suitable if view.name not in candidate.avoided_nodes]
        best = unavoided if len(unavoided) >= wanted.min_nodes else suitable
        chosen = sorted(best, key=lambda view: (*_left_over(view, used), view.name))[: wanted.max_nodes]
        if len(chosen) >= wanted.min_nodes:
            started[candidate.attempt_id] = [view.name for view in chosen]
            used += [_naive_task(view, wanted, used) for view in chosen]
    return started


def _left_over(view: NodeInfo, used: list[NodeTask]) -> tuple[int, Fraction]:
    on_node = [task for task in used if task.node == view.name]
    num_gpus = len(view.gpus) - sum(len(task.gpu_ids) for task in on_node)
    return num_gpus, exact(view.cpus) - sum(exact(task.cpus) for task in on_node)


def _naive_task(view: NodeInfo, wanted: ResourceRequest, used: list[NodeTask]) -> NodeTask:
    gpus_in_use = {index for task in used if task.node == view.name for index in task.gpu_ids}
    kind, count = (wanted.gpus.kind, wanted.gpus.count) if wanted.gpus else (None, 0)
    free = [gpu.index for gpu in view.gpus if gpu.index not in gpus_in_use and kind in (None, gpu.kind)]
    gpu_share = Fraction(count, len(view.gpus)) if view.gpus else Fraction(0)
    by_share = int(view.memory_bytes * max(exact(wanted.cpus) / exact(view.cpus), gpu_share))
    return NodeTask(
        node=view.name,
        cpus=wanted.cpus,
        memory_bytes=by_share if wanted.memory_bytes is None else wanted.memory_bytes,
        disk_bytes=wanted.disk_bytes,
        gpu_ids=tuple(free[:count]),
    )


def _without_limit(wanted: ResourceRequest) -> ResourceRequest:
    """Without a limit no start can be promised, and no job is delayed for a promise."""
    return msgspec.structs.replace(wanted, topology=None, time_limit_s=None)


@given(snapshots())
def test_plans_are_those_of_a_slow_and_obvious_scheduler(snapshot: Snapshot) -> None:
    plain = [
        msgspec.structs.replace(c, request=_without_limit(c.request), project="vision", queue="default")
        for c in snapshot.candidates
        if not c.unmet and c.not_before <= NOW and c.array_id is None
    ]
    holdings = [msgspec.structs.replace(held, time_limit_s=None) for held in snapshot.holdings]
    snapshot = msgspec.structs.replace(snapshot, candidates=tuple(plain), holdings=tuple(holdings))
    result = plan(snapshot, Policy(patience_s=inf), NOW)
    nodes = {start.attempt_id: [task.node for task in start.allocation] for start in result.starts}
    assert nodes == naive_starts(snapshot)
