"""Records as the scheduler is shown them. Pure; what is shown when is the queue's business."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shoal.model.attempt import Attempt, AttemptState
from shoal.model.job import Dependency, DependencyKind, Job, JobOutcome
from shoal.model.node import Node, NodeState
from shoal.scheduler import Candidate, GpuView, Holding, NodeView, UnmetDependency

MEMORY_STEP = 64 << 20
"""Nodes bought alike differ by a few pages; rounded down they are alike, and are scored once."""

WORDS = {
    NodeState.CORDONED: "cordoned",
    NodeState.DRAINING: "being drained",
    NodeState.DRAINED: "drained",
    NodeState.DEAD: "declared dead",
}

Outcomes = Mapping[str, JobOutcome | None]


def label(job: Job) -> str:
    """How people name the job in a sentence."""
    element = "" if job.array is None else f"[{job.array.index}]"
    return f"{job.reference} {job.name}{element}"


def candidate(job: Job, attempt: Attempt) -> Candidate:
    """A queued attempt that waits for nothing but room."""
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


def unmet(after: Iterable[Dependency], outcomes: Outcomes) -> tuple[UnmetDependency, ...]:
    """What has not ended yet."""
    return tuple(
        UnmetDependency(label=dep.label, on=dep.on) for dep in after if outcomes.get(dep.job_id) is None
    )


def broken(after: Iterable[Dependency], outcomes: Outcomes) -> str | None:
    """Why a job can never start, if a job it waits for ended the wrong way."""
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
        is_leaving=attempt.state is AttemptState.STOPPING,
        grows_to=attempt.grows_to,
        request=job.request,
        excluded_nodes=job.excluded_nodes,
        num_evicted=job.evictions,
        is_endless=job.replica is not None,
    )


def node_view(node: Node) -> NodeView:
    """A node as the scheduler sees it."""
    facts = node.facts
    return NodeView(
        name=facts.name,
        pool=facts.pool,
        cpus=facts.cpus,
        memory_bytes=facts.memory_bytes - facts.memory_bytes % MEMORY_STEP,
        disk_bytes=facts.disk_bytes,
        gpus=tuple(GpuView(gpu.index, gpu.kind) for gpu in facts.gpus),
        labels=facts.labels,
        is_busy=facts.is_busy,
        **_closed(node),
    )


def _closed(node: Node) -> dict[str, Any]:
    """No ages: a view is told once, and explained for as long as it is true."""
    if node.state is NodeState.READY:
        told = node.no_watts if node.facts.is_alive else node.facts.closed or "not answering"
        return {} if told is None else {"closed_because": told}
    told = f"{WORDS[node.state]} by {node.by}"
    return {"closed_because": told, "closed_at": node.changed_at, "closed_note": node.because}
