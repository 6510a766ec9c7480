"""Start a drill, and list past ones: one transaction each, with its event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import msgspec

from shoal.control.actor import Actor
from shoal.control.capabilities import Records
from shoal.control.job_specs import spec_of
from shoal.control.memory.leases import QUIET_S
from shoal.control.memory.open_drills import OpenDrill, drill_facts
from shoal.control.memory.running import RunningAttempts
from shoal.control.record import fingerprint, record_event, run_idempotent
from shoal.errors import NotFound, SpecError, StateError
from shoal.ids import IdFactory
from shoal.model.attempt import Attempt, AttemptState, EndReason
from shoal.model.drill import ON_RANKS, Drill, DrillKind, DrillReport
from shoal.model.job import Job, ReplicaRef
from shoal.spec.error_text import nearest
from shoal.spec.job_fields import MAX_RETRIES
from shoal.store import Event, EventFilter, Tx
from shoal.wire import Progress

MAX_RUNNING = 200
"""Attempts that are followed after a drill killed the control plane."""
STARTED, FINISHED = "drill.started", "drill.finished"
LOOK_BACK = 100_000
"""Events. No more are recorded while a drill lasts."""
MAX_FOUND = 1000
MORE_RETRIES = 3
"""Retries that the hint adds for a job that has none left: enough for some drills."""
SETTLED_S = 15.0
"""A program that has run this long has reported a step, or never will: renewals come every 5 s."""
MARGIN_S = 60.0
"""How long after its expected end a drill without a result still keeps other drills away."""

# Made at import, by one thread: msgspec examines a type at its first use, and several threads read from the
# store.
_DRILL = msgspec.json.Decoder(Drill)
_RESULT = msgspec.json.Decoder(DrillReport)


class DrillRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the caller asks for. `rank` and `node`: None means the last one."""

    kind: DrillKind
    job_id: str = ""
    rank: int | None = None
    node: str | None = None
    for_s: float = 0.0
    window_s: float = 20.0
    within_s: float = 120.0
    is_forced: bool = False


class DrillRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A drill as the log has it. `result` None: it is under way, or no control plane saw its end."""

    drill: Drill
    project: str | None
    ref: str | None
    result: DrillReport | None


async def start_drill(
    records: Records, running: RunningAttempts, actor: Actor, request: DrillRequest, key: str | None
) -> Drill:
    """Record the drill. Supervisors learn of it at once if they wait for a reply, else with their next
    renewal.

    `StateError`: the job's present state does not allow it, and nothing began.
    """

    def change(tx: Tx) -> tuple[Drill, bool]:
        now = records.clock.now()
        digest = fingerprint(STARTED, msgspec.to_builtins(request))
        return run_idempotent(
            tx,
            actor,
            key,
            digest,
            now,
            Drill,
            lambda: _start(records.new_id, running, tx, actor, request, now),
        )

    drill, was_repeated = await records.store.write(change)
    if not was_repeated:
        running.drills.by_id[drill.drill_id] = OpenDrill(drill)
        running.rendezvous.notify(drill.attempt_id)
    return drill


def drill_history(tx: Tx, events: list[Event]) -> list[DrillRecord]:
    """Return the drills that these events report, in their order."""
    refs = tx.jobs.references(event.job_id for event in events if event.job_id)
    results = {e.data["drill_id"]: e.data["result"] for e in events if e.kind == FINISHED}
    return [
        DrillRecord(
            drill=_drill(event.data),
            project=event.project,
            ref=refs.get(event.job_id) if event.job_id else None,
            result=_result(results.get(event.data["drill_id"])),
        )
        for event in events
        if event.kind == STARTED
    ]


def unfinished_drills(tx: Tx) -> list[Drill]:
    """Return drills without a result, the oldest first."""
    after = max(0, tx.events.head().seq - LOOK_BACK)
    events = tx.events.latest(MAX_FOUND, EventFilter(kinds_prefix="drill."), after)
    finished = {event.data["drill_id"] for event in events if event.kind == FINISHED}
    started = [event.data for event in events if event.kind == STARTED]
    return [_drill(data) for data in started if data["drill_id"] not in finished]


def _drill(data: object) -> Drill:
    return _DRILL.decode(msgspec.json.encode(data))


def _result(data: object) -> DrillReport | None:
    return None if data is None else _RESULT.decode(msgspec.json.encode(data))


def _start(
    new_id: IdFactory, running: RunningAttempts, tx: Tx, actor: Actor, request: DrillRequest, now: float
) -> Drill:
    _check_no_other_drill(tx, request, now)
    drill = Drill(
        drill_id=new_id("drl"),
        kind=request.kind,
        started_at=now,
        by=actor.name,
        for_s=request.for_s,
        window_s=request.window_s,
        within_s=request.within_s + request.for_s,
    )
    if request.kind is DrillKind.KILL_CONTROL:
        drill = msgspec.structs.replace(drill, running=_running_progress(running, tx.attempts.holding()))
        record_event(tx, STARTED, now, actor, data=drill_facts(drill))
        return drill
    job, attempt = tx.jobs.get(request.job_id), tx.attempts.newest(request.job_id)
    if job is None or attempt is None:
        raise NotFound("no such thing, or one you may not see")
    if attempt.state is not AttemptState.RUNNING:
        raise StateError(
            f"job {job.reference} is {'over' if not job.is_open else attempt.state}; a drill needs one that "
            "runs",
            hint=f"shoal why {job.reference}",
        )
    node, rank = _target(job, attempt, request)
    if request.kind is DrillKind.HANG:
        _check_reports_steps(running, job, attempt, node, now)
    if not request.is_forced:
        _check_survives(job, attempt, request)
    drill = msgspec.structs.replace(
        drill,
        job_id=job.job_id,
        attempt_id=attempt.attempt_id,
        epoch=attempt.epoch,
        rendezvous_round=attempt.rendezvous_round,
        nodes=attempt.node_names,
        node=node,
        rank=rank,
    )
    record_event(tx, STARTED, now, actor, job=job, attempt=attempt, node=node, data=drill_facts(drill))
    return drill


def _running_progress(
    running: RunningAttempts, holding: Sequence[tuple[Job, Attempt]]
) -> dict[str, Progress | None]:
    """Return the progress of running attempts that are not silent; if there are more than `MAX_RUNNING`, the
    oldest. A supervisor that was silent before the drill could not show that it found the control plane
    again.
    """
    attempts = [attempt for _, attempt in holding if attempt.state is AttemptState.RUNNING]
    renewing = [attempt for attempt in attempts if not running.leases.silent_nodes(attempt, QUIET_S)]
    return {
        attempt.attempt_id: next(iter(running.drills.progress(attempt.attempt_id, attempt.node_names)), None)
        for attempt in renewing[:MAX_RUNNING]
    }


def _check_no_other_drill(tx: Tx, request: DrillRequest, now: float) -> None:
    """Refuse a second fault at a time: of two faults, it could not be told which did what."""
    for other in unfinished_drills(tx):
        is_mine = other.job_id == request.job_id
        is_late = now > other.started_at + 2 * other.within_s + other.window_s + MARGIN_S
        if not is_late and (is_mine or DrillKind.KILL_CONTROL in (other.kind, request.kind)):
            raise StateError(
                f"drill {other.drill_id} ({other.kind}) is under way",
                hint="see it with `shoal drill history`; it ends by itself",
            )


def _target(job: Job, attempt: Attempt, request: DrillRequest) -> tuple[str, int | None]:
    """Return the node of the fault, and the rank if the fault is about one."""
    names, per_node = attempt.node_names, job.request.ranks_per_node
    world_size = len(names) * per_node
    if request.node is not None and request.node not in names:
        meant = nearest(request.node, names)
        near = f"; did you mean `{meant}`?" if meant else f"; it runs on {', '.join(names)}"
        raise SpecError(
            f"{job.reference} does not run on `{request.node}`{near}", hint=f"--node {meant or names[-1]}"
        )
    if request.rank is not None and request.rank >= world_size:
        has = "one rank, 0" if world_size == 1 else f"{world_size} ranks, 0 to {world_size - 1}"
        raise SpecError(
            f"{job.reference} has {has}; {request.rank} is none", hint=f"--rank {world_size - 1}, the last"
        )
    if request.kind in (DrillKind.KILL_RANK, DrillKind.HANG):
        rank = world_size - 1 if request.rank is None else request.rank
        return names[rank // per_node], rank
    if request.kind is DrillKind.CORRUPT_CHECKPOINT:
        return names[0], None
    return request.node or names[-1], None


def _check_reports_steps(running: RunningAttempts, job: Job, attempt: Attempt, node: str, now: float) -> None:
    """Refuse to hang a rank if no step would be missed. For a job that has just begun, its supervisor
    decides.
    """
    is_heard = running.drills.rendezvous_round(attempt.attempt_id, node) >= 0
    has_begun = attempt.started_at is not None and now > attempt.started_at + SETTLED_S
    if is_heard and has_begun and not running.drills.progress(attempt.attempt_id, (node,)):
        raise StateError(
            f"job {job.reference} reports no steps, so a rank that hangs could not be noticed; "
            "nothing was done to it",
            hint="its program reports steps with `runtime.train` or a callback of `shoal.runtime`; "
            "if it does, try again after its first steps",
        )


def _refuse_to_end(job: Job, place: ReplicaRef, request: DrillRequest) -> NoReturn:
    """Refuse to end a replica. It has neither retries nor checkpoints, and its service would
    start another.
    """
    if request.kind is DrillKind.CORRUPT_CHECKPOINT:
        raise StateError(
            f"{job.reference} is a replica of service {place.service}: it keeps no checkpoints to damage",
            hint=f"`shoal drill kill-rank {job.reference} --force` ends it, and another takes its place",
        )
    raise StateError(
        f"{job.reference} is a replica of service {place.service}: it would end, and another take its place",
        hint=f"`--force` does it; `shoal services {job.project}/{place.service}` shows the one that follows",
    )


def _check_survives(job: Job, attempt: Attempt, request: DrillRequest) -> None:
    """Refuse a drill that would end the job or lose its work."""
    spec = spec_of(job)
    force = "`--force` does it all the same"
    if job.replica is not None and request.kind is not DrillKind.PARTITION:
        _refuse_to_end(job, job.replica, request)
    left = job.retry.max_retries - job.failures - attempt.restarts
    if request.kind in ON_RANKS and (left <= 0 or EndReason.SIGNAL not in job.retry.on):
        had = job.retry.max_retries
        has = f"has no retry left of the {had} it had" if had else "has no `retry`"
        more = f"max: {min(had + MORE_RETRIES, MAX_RETRIES)}"
        if EndReason.SIGNAL not in job.retry.on:
            has, more = "has no `retry` on `signal`", f"{more}, on: [exit, signal]"
        raise StateError(
            f"job {job.reference} {has}: it would end as failed",
            hint=f"submit it with `retry: {{{more}}}`; {force}",
        )
    if request.kind is DrillKind.CORRUPT_CHECKPOINT and spec.checkpoint is None:
        raise StateError(
            f"job {job.reference} keeps no checkpoints: there is none to damage",
            hint="submit it with `checkpoint: {}`",
        )
    if request.kind is DrillKind.KILL_NODE and spec.checkpoint is None:
        raise StateError(
            f"job {job.reference} keeps no checkpoints: it may begin from the start again",
            hint=f"submit it with `checkpoint: {{}}`; {force}",
        )
    if request.kind is DrillKind.PARTITION and request.for_s >= spec.fence:
        raise StateError(
            f"after {spec.fence:g} s without an answer job {job.reference} is stopped (its `fence`)",
            hint=f"`--for` less than that; {force}",
        )
