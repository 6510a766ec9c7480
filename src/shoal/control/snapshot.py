"""What the scheduler is shown, read from the store in one transaction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from shoal.control.backoff import Backoff
from shoal.model.attempt import Attempt
from shoal.model.job import Dependency, DependencyKind, Job, JobOutcome
from shoal.model.node import Node, NodeState
from shoal.scheduler import Candidate, GpuView, Holding, NodeView, Snapshot, UnmetDependency
from shoal.store import Tx

MAX_CANDIDATES = 5_000
"""Planned for in one cycle, in order; whoever is further back waits behind them. Those that may not start
whatever is free (a dependency, a backoff, a full array) are not counted, or they would block the rest."""
LOOK_FURTHER = 4
"""How much more of the queue is read when too few at its head may start."""
MEMORY_STEP = 64 << 20
"""Nodes bought alike differ by a few pages; rounded down they are alike, and are scored once."""


class Loaded(msgspec.Struct, frozen=True):
    """The snapshot, and the queued attempts whose dependencies can never be met."""

    snapshot: Snapshot
    doomed: tuple[tuple[str, str], ...]
    """(attempt id, why)."""
    next_ready_s: float | None
    """When the first backoff ends, if one is running."""


def load(tx: Tx, backoff: Backoff, now: float) -> Loaded:
    """Everything one scheduling cycle needs."""
    holdings = tuple(_holding(job, attempt) for job, attempt in tx.attempts.holding())
    limit = MAX_CANDIDATES
    while True:
        queued = tx.attempts.queued(limit)
        waiting, doomed = _sorted_out(tx, queued, backoff, now)
        ready, held_up = _ready(waiting, holdings, now)
        if len(queued) < limit or len(ready) > MAX_CANDIDATES // 2:
            break
        limit *= LOOK_FURTHER
    backoff.keep_only(attempt.attempt_id for _, attempt in queued)
    chosen = ready[:MAX_CANDIDATES] + held_up[:MAX_CANDIDATES]
    snapshot = Snapshot(
        nodes=tuple(node_view(node, now) for node in sorted(tx.nodes.all(), key=lambda n: n.name)),
        holdings=holdings,
        candidates=tuple(sorted(chosen, key=lambda candidate: candidate.order)),
    )
    delays = [candidate.not_before - now for candidate in waiting if candidate.not_before > now]
    return Loaded(snapshot, tuple(doomed), min(delays, default=None))


def _sorted_out(
    tx: Tx, queued: list[tuple[Job, Attempt]], backoff: Backoff, now: float
) -> tuple[list[Candidate], list[tuple[str, str]]]:
    """Who may start some time, and who never will, with why."""
    waited_for = {dep.job_id for job, _ in queued for dep in job.after}
    outcomes = tx.jobs.outcomes(sorted(waited_for)) if waited_for else {}
    waiting, doomed = [], []
    for order, (job, attempt) in enumerate(queued):
        broken = _broken(job, outcomes)
        if broken is not None:
            doomed.append((attempt.attempt_id, broken))
            continue
        left_s = backoff.remaining_s(attempt)
        waiting.append(_candidate(job, attempt, order, now + left_s, outcomes))
    return waiting, doomed


def _ready(
    waiting: list[Candidate], holdings: tuple[Holding, ...], now: float
) -> tuple[list[Candidate], list[Candidate]]:
    """Who may start now if there is room, and who may not whatever is free."""
    in_arrays = Counter(holding.array_id for holding in holdings)
    ready: list[Candidate] = []
    held_up: list[Candidate] = []
    for candidate in waiting:
        most = candidate.array_at_once
        is_full = most is not None and in_arrays[candidate.array_id] >= most
        if candidate.unmet or candidate.not_before > now or is_full:
            held_up.append(candidate)
        else:
            in_arrays[candidate.array_id] += 1
            ready.append(candidate)
    return ready, held_up


def label(job: Job) -> str:
    """How people name the job in a sentence."""
    return f"{job.reference} {job.name}"


def _candidate(
    job: Job,
    attempt: Attempt,
    order: int,
    not_before: float,
    outcomes: dict[str, JobOutcome | None],
) -> Candidate:
    return Candidate(
        attempt_id=attempt.attempt_id,
        job_id=job.job_id,
        project=job.project,
        queue=job.queue,
        label=label(job),
        priority=job.priority,
        order=order,
        submitted_at=job.submitted_at,
        not_before=not_before if attempt.backoff_s > 0 else 0.0,
        unmet=_unmet(job.after, outcomes),
        request=job.request,
        excluded_nodes=job.excluded_nodes,
        array_id=job.array.array_id if job.array else None,
        array_at_once=job.array.at_once if job.array else None,
    )


def _unmet(
    after: Iterable[Dependency], outcomes: dict[str, JobOutcome | None]
) -> tuple[UnmetDependency, ...]:
    return tuple(
        UnmetDependency(label=dep.label, on=dep.on) for dep in after if outcomes.get(dep.job_id) is None
    )


def _broken(job: Job, outcomes: dict[str, JobOutcome | None]) -> str | None:
    """Why the job can never start, if a job it waits for ended the wrong way."""
    for dep in job.after:
        outcome = outcomes.get(dep.job_id)
        if outcome is not None and dep.on is not DependencyKind.ENDED and outcome.value != dep.on.value:
            did = "was cancelled" if outcome is JobOutcome.CANCELLED else str(outcome)
            return f"{dep.label} {did}; this job was to start only after it {dep.on}"
    return None


def _holding(job: Job, attempt: Attempt) -> Holding:
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
    )


def node_view(node: Node, now: float) -> NodeView:
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
        closed_because=_closed_because(node, now),
    )


def _closed_because(node: Node, now: float) -> str | None:
    if node.state is NodeState.READY:
        return None if node.facts.is_alive else "not answering"
    words = {NodeState.CORDONED: "cordoned", NodeState.DRAINING: "drained", NodeState.DEAD: "declared dead"}
    told = f"{words[node.state]} by {node.by} {age(now - node.changed_at)} ago"
    return f'{told} ("{node.because}")' if node.because else told


def age(seconds: float) -> str:
    """A duration as people say it."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(int(seconds), 0)} s"
