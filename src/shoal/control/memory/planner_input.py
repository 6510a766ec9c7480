"""Translate records into what the scheduler sees.

The functions are pure; `queue.py` decides what the planner is told, and when. `PlannerNodes` holds the nodes
as of the last look and the requests that they could hold. `PlannerProjects` keeps the planner's tree of
projects current.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from shoal.control.project_tree import project_view
from shoal.model.attempt import Attempt, AttemptState
from shoal.model.job import Dependency, DependencyKind, Job, JobOutcome, ResourceRequest
from shoal.model.node import Node, NodeState
from shoal.model.people import Project
from shoal.scheduler import (
    Candidate,
    Explanation,
    GpuInfo,
    Holding,
    NodeInfo,
    Planner,
    UnmetDependency,
    WaitReason,
    explain_impossible,
    missing_nodes_text,
)
from shoal.scheduler.order.fair_share import Usage

MEMORY_STEP = 64 << 20
"""Nodes bought alike differ by a few pages. Rounded down they are alike, and are scored once."""

STATE_TEXT = {
    NodeState.CORDONED: "cordoned",
    NodeState.DRAINING: "being drained",
    NodeState.DRAINED: "drained",
    NodeState.DEAD: "declared dead",
}

JobOutcomes = Mapping[str, JobOutcome | None]


def label(job: Job) -> str:
    """Return the job's name as people read it in a sentence."""
    element = "" if job.array is None else f"[{job.array.index}]"
    return f"{job.reference} {job.name}{element}"


def candidate(job: Job, attempt: Attempt) -> Candidate:
    """Return a queued attempt that waits only for resources."""
    return Candidate(
        attempt_id=attempt.attempt_id,
        job_id=job.job_id,
        project=job.project,
        queue=job.queue,
        label=label(job),
        priority=job.priority,
        order=int(job.submitted_at * 1e6),
        number=job.number,
        submitted_at=job.submitted_at,
        request=job.request,
        excluded_nodes=job.excluded_nodes,
        avoided_nodes=job.avoided_nodes,
        array_id=job.array.array_id if job.array else None,
        array_at_once=job.array.at_once if job.array else None,
        owner=job.owner,
        name=job.name,
        deadline_at=job.deadline_at,
        num_evicted=job.evictions,
        is_endless=job.replica is not None,
    )


def unmet_dependencies(after: Iterable[Dependency], outcomes: JobOutcomes) -> tuple[UnmetDependency, ...]:
    """Return the dependencies that have not ended."""
    return tuple(
        UnmetDependency(label=dep.label, on=dep.on) for dep in after if outcomes.get(dep.job_id) is None
    )


def broken_dependency(after: Iterable[Dependency], outcomes: JobOutcomes) -> str | None:
    """Return why a job can never start, if a job it waits for ended the wrong way."""
    for dep in after:
        outcome = outcomes.get(dep.job_id)
        if outcome is not None and dep.on is not DependencyKind.ENDED and outcome.value != dep.on.value:
            did = "was cancelled" if outcome is JobOutcome.CANCELLED else str(outcome)
            return f"{dep.label} {did}; this job was to start only after it {dep.on}"
    return None


def holding(job: Job, attempt: Attempt) -> Holding:
    return Holding(
        attempt_id=attempt.attempt_id,
        job_id=job.job_id,
        project=job.project,
        priority=job.priority,
        allocation=attempt.allocation,
        placed_at=attempt.placed_at or attempt.queued_at,
        time_limit_s=job.request.time_limit_s,
        array_id=job.array.array_id if job.array else None,
        label=label(job),
        owner=job.owner,
        name=job.name,
        is_stopping=attempt.state is AttemptState.STOPPING,
        grows_to=attempt.grows_to,
        request=job.request,
        excluded_nodes=job.excluded_nodes,
        avoided_nodes=job.avoided_nodes,
        num_evicted=job.evictions,
        is_endless=job.replica is not None,
    )


def node_view(node: Node) -> NodeInfo:
    """Return a node as the scheduler sees it."""
    facts = node.facts
    return NodeInfo(
        name=facts.name,
        pool=facts.pool,
        cpus=facts.cpus,
        memory_bytes=facts.memory_bytes - facts.memory_bytes % MEMORY_STEP,
        disk_bytes=facts.disk_bytes,
        gpus=tuple(GpuInfo(gpu.index, gpu.kind) for gpu in facts.gpus),
        labels=facts.labels,
        is_busy=facts.is_busy,
        **_closed(node),
    )


def _closed(node: Node) -> dict[str, Any]:
    """Return why the node takes no work. No ages, because the planner gets a view once and explains with it
    as long as it is true.
    """
    if node.state is NodeState.READY:
        reason = node.power_label_problem if node.facts.is_alive else node.facts.closed or "not answering"
        return {} if reason is None else {"closed_because": reason}
    reason = f"{STATE_TEXT[node.state]} by {node.by}"
    return {"closed_because": reason, "closed_at": node.changed_at, "closed_note": node.because}


MAX_POSSIBLE = 1024
"""Number of requests that are remembered as possible."""


class PlannerNodes:
    """The nodes that the planner knows. Empty until the first look. The planner does not see nodes that are
    gone.
    """

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._gone: list[Node] = []
        self._possible: set[ResourceRequest] = set()

    def update(self, planner: Planner, nodes: list[Node]) -> bool:
        """Tell the planner which nodes changed. Return whether any did."""
        there = [node for node in nodes if not node.is_gone]
        self._gone = [node for node in nodes if node.is_gone]
        if there == self._nodes:
            return False
        before = {node.name: node for node in self._nodes}
        for node in there:
            if before.pop(node.name, None) != node:
                planner.set_node(node_view(node))
        for name in before:
            planner.drop_node(name)
        self._nodes = there
        self._possible.clear()
        return True

    @property
    def pools(self) -> frozenset[str]:
        return frozenset(node.facts.pool for node in self._nodes)

    def is_alive(self, name: str) -> bool:
        """Whether the node answers, as its engine last said."""
        return any(node.name == name and node.facts.is_alive for node in self._nodes)

    def views(self) -> tuple[NodeInfo, ...]:
        """Return the nodes as the scheduler sees them, by name."""
        return _views(self._nodes)

    def never_fits(self, request: ResourceRequest) -> Explanation | None:
        """Return why no set of these nodes could ever hold the request. None if one could, or if no node is
        known.
        """
        if request in self._possible:
            return None
        never = explain_impossible(request, self.views())
        if never is None and len(self._possible) < MAX_POSSIBLE:
            self._possible.add(request)
        return never and self.with_missing_nodes(never, request)

    def with_missing_nodes(self, explanation: Explanation, request: ResourceRequest) -> Explanation:
        """Add the nodes that are gone to the explanation, if the request would fit with them."""
        if explanation.why not in (WaitReason.NEVER_FITS, WaitReason.NO_NODES) or not self._gone:
            return explanation
        sentence = missing_nodes_text(request, self.views(), _views(self._gone))
        return (
            msgspec.structs.replace(explanation, sentence=f"{explanation.sentence}; {sentence}")
            if sentence
            else explanation
        )


def _views(nodes: Iterable[Node]) -> tuple[NodeInfo, ...]:
    return tuple(node_view(node) for node in sorted(nodes, key=lambda node: node.name))


class PlannerProjects:
    """Keeps the planner's tree of projects current. Empty until the first look."""

    def __init__(self) -> None:
        self._has_usages = False

    def update(self, planner: Planner, projects: Sequence[Project], usages: Sequence[Usage]) -> None:
        """Give the planner the tree. `usages`: recorded usage as of the first look; later the planner knows
        it itself.
        """
        planner.set_projects(map(project_view, projects), () if self._has_usages else usages)
        self._has_usages = True
