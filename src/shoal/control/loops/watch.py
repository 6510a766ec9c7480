"""Compare what the engine sees with what is recorded, and feed the differences in as events.

The order of reads matters. The attempts that hold resources are read first, and the engine is asked second.
So an attempt that held resources then, is not being submitted, and is not listed now, does not run anywhere.
"""

from __future__ import annotations

import msgspec
import structlog

from shoal.clock import Clock
from shoal.control.capabilities import Records, SubmissionInputs, Upkeep
from shoal.control.job_specs import spec_of
from shoal.control.loops.launch import launch
from shoal.control.loops.node_refresh import refresh_nodes
from shoal.control.loops.replace import can_replace, record_end
from shoal.control.memory.leases import FENCE_MARGIN_S
from shoal.control.memory.running import RunningAttempts
from shoal.engines.base import Engine, Observation, SupportsReaping
from shoal.errors import EngineUnreachable, StoreUnavailable
from shoal.model.attempt import Attempt, AttemptState, EndReason
from shoal.model.evidence import UNSTARTED, UNSUPERVISED, Evidence
from shoal.model.job import Job
from shoal.model.moves import (
    AttemptEvent,
    FenceExpired,
    OrphanCleared,
    StopRequested,
    TaskEnded,
    TaskOrphaned,
    TaskStarted,
)
from shoal.store import Tx
from shoal.wire import MAX_OUTCOME_MESSAGE, EndKind, TaskOutcome

log = structlog.get_logger()

ObservedTasks = dict[str, dict[str, Observation]]
REPLACEMENT_PATIENCE_S = 60.0
"""How long a task in place of a lost one may take to begin before its attempt ends; and how long the
processes of the lost task may take to die.
"""
MISSED_S = 8.0
"""A node renews every 5 s. If one has been silent for longer when ranks of its peers fail, the silence
explains their failures.
"""
LATE_STOP_S = 60.0
"""How long after a time limit the control plane stops an attempt whose supervisor did not."""


async def watch(upkeep: Upkeep, inputs: SubmissionInputs) -> None:
    """Look once at everything that runs or should run."""
    holding = await upkeep.records.store.read(lambda tx: tx.attempts.holding())
    upkeep.running.follow([attempt for _, attempt in holding])
    being_submitted = frozenset(upkeep.running.submitting)
    seen = await _observe(upkeep.link.engine)
    failed: Exception | None = None
    for job, attempt in holding:
        if attempt.attempt_id in being_submitted:
            continue
        try:
            await _compare(upkeep, inputs, job, attempt, seen)
        except StoreUnavailable:
            raise
        except Exception as error:
            # An attempt that cannot be judged must not keep the others from being watched.
            log.exception("watch.failed", attempt=attempt.attempt_id)
            failed = failed or error
    if seen is not None:
        others = sorted(seen.keys() - {attempt.attempt_id for _, attempt in holding})
        recorded = (
            await upkeep.records.store.read(lambda tx: [tx.attempts.get(attempt_id) for attempt_id in others])
            if others
            else []
        )
        for attempt_id, record in zip(others, recorded, strict=True):
            await _clean_up(upkeep.link.engine, attempt_id, record, seen[attempt_id])
    if failed is not None:
        raise failed


async def check_attempt(upkeep: Upkeep, inputs: SubmissionInputs, attempt_id: str) -> None:
    """Look for lost tasks of one running attempt with several nodes, ahead of the next turn."""
    recorded = await upkeep.records.store.read(lambda tx: tx.attempts.with_jobs([attempt_id]))
    running = [(job, attempt) for job, attempt in recorded if attempt.state is AttemptState.RUNNING]
    for job, attempt in running if attempt_id not in upkeep.running.submitting else ():
        if len(attempt.allocation) > 1:
            await _compare(upkeep, inputs, job, attempt, await _observe(upkeep.link.engine))


async def _observe(engine: Engine) -> ObservedTasks | None:
    """Return what the engine lists, by attempt and node; None if it does not answer."""
    try:
        observations = await engine.list_owned()
    except EngineUnreachable as error:
        log.warning("engine.unreachable", engine=engine.name, error=error.message)
        return None
    seen: ObservedTasks = {}
    for observation in observations:
        seen.setdefault(observation.attempt_id, {})[observation.node] = observation
    return seen


async def _compare(
    upkeep: Upkeep, inputs: SubmissionInputs, job: Job, attempt: Attempt, observations: ObservedTasks | None
) -> None:
    observed = None if observations is None else observations.get(attempt.attempt_id, {})
    if observed is not None and _should_submit(attempt, observed):
        await _submit_again(upkeep, inputs, job, attempt)
    elif observed is not None:
        upkeep.running.leases.note_trouble(attempt.attempt_id, "", None)
    events = (
        []
        if observed is None
        else _events(upkeep.records.clock, upkeep.running, upkeep.link.engine, job, attempt, observed)
    )
    before, num_ended = attempt, sum(isinstance(event, TaskEnded) for event in events)
    has_survivors = num_ended < len(attempt.nodes_left)
    is_mended = has_survivors and attempt.state is AttemptState.RUNNING and len(attempt.allocation) > 1
    if num_ended and (is_mended or _is_lost_unbegun(attempt, events)):
        # A node that is gone can take neither another task nor the next attempt.
        await refresh_nodes(upkeep.records, upkeep.link)
    for event in events:
        attempt = await _advance(upkeep, attempt, event, has_survivors=has_survivors)
    attempt = await _fence(upkeep, job, attempt, observed or {})
    if attempt.rendezvous_round > before.rendezvous_round:
        await _replace_lost(upkeep, inputs, attempt)
    if attempt.state is AttemptState.STOPPING:
        await cancel(upkeep.link.engine, job, attempt)


def _is_lost_unbegun(attempt: Attempt, events: list[AttemptEvent]) -> bool:
    return attempt.state is AttemptState.STARTING and any(
        isinstance(event, TaskEnded) and event.outcome.kind is EndKind.LOST for event in events
    )


def _should_submit(attempt: Attempt, observed: dict[str, Observation]) -> bool:
    """Whether to submit the attempt again: it is placed, but not all of it has begun, because this control
    plane or a supervisor was killed during the submission.
    """
    if attempt.state not in (AttemptState.STARTING, AttemptState.RUNNING):
        return False
    is_starting = attempt.state is AttemptState.STARTING
    seen = [
        _present(attempt, observed, node)
        for node in (attempt.nodes_left if is_starting else attempt.nodes_to_start)
    ]
    # A task that waits in the cluster's own queue was handed over. If each of hundreds were submitted again
    # at every look, the cluster would only repeat that, and no attempt would be watched meanwhile. But tasks
    # that already run wait for a lost task's successor only for REPLACEMENT_PATIENCE_S.
    waiting = (Evidence.PENDING,) if is_starting else UNSTARTED
    return any(observation is None or observation.evidence in waiting for observation in seen)


def _present(attempt: Attempt, observed: dict[str, Observation], node: str) -> Observation | None:
    """Return the observation of the node's present task. An earlier task that it replaces is no
    part of it.
    """
    seen = observed.get(node)
    return None if seen is None or seen.replacement < attempt.replacement_on(node) else seen


def _is_pending(observation: Observation | None) -> bool:
    return observation is not None and observation.evidence in UNSTARTED


def _events(
    clock: Clock,
    running: RunningAttempts,
    engine: Engine,
    job: Job,
    attempt: Attempt,
    observed: dict[str, Observation],
) -> list[AttemptEvent]:
    events: list[AttemptEvent] = []
    for node in attempt.nodes_left:
        seen = _present(attempt, observed, node)
        if seen is None and _may_be_starting(attempt, node):
            continue  # just handed over again
        if seen is None:
            events.append(TaskEnded(_unlisted(clock, engine, attempt, node)))
        elif seen.replacement > attempt.replacement_on(node):
            continue  # begun after the attempts were read: next time
        elif seen.evidence in UNSUPERVISED:
            # Before the check of the epoch, because a task whose files cannot be read has none: this ends
            # nothing.
            events += _unsupervised(clock, running, engine, job, attempt, seen)
        elif seen.epoch != attempt.epoch:
            log.error("engine.stale_epoch", attempt=attempt.attempt_id, epoch=seen.epoch)
        elif seen.evidence is Evidence.ENDED and seen.outcome is not None:
            events.append(TaskEnded(seen.outcome))
        elif seen.evidence in UNSTARTED:
            is_queued = seen.evidence is Evidence.QUEUED
            running.leases.note_trouble(attempt.attempt_id, node, seen.raw, is_queued=is_queued)
            # Waiting is no silence: the task cannot begin before it has asked for its task spec. But the
            # other tasks of a running group wait for this one and may hold what it needs: see
            # REPLACEMENT_PATIENCE_S.
            if is_queued and not _is_awaited(attempt, node):
                running.leases.note_alive(attempt.attempt_id, node, seen.replacement, is_hearsay=True)
        elif seen.evidence in (Evidence.ALIVE, Evidence.SUSPENDED):
            attempt_id, ago_s, is_hearsay = attempt.attempt_id, seen.silent_s, seen.evidence.rule.is_hearsay
            running.leases.note_alive(attempt_id, node, seen.replacement, ago_s=ago_s, is_hearsay=is_hearsay)
            running.leases.note_trouble(attempt.attempt_id, node, None)
            events += _supervised_again(running, attempt, node, seen.evidence)
            if seen.started_at is not None and node not in attempt.started_nodes:
                events.append(TaskStarted(node, seen.replacement))
        else:
            events += _supervised_again(running, attempt, node, seen.evidence)
    return events + _overdue(running, job, attempt)


def _unsupervised(
    clock: Clock,
    running: RunningAttempts,
    engine: Engine,
    job: Job,
    attempt: Attempt,
    observation: Observation,
) -> list[AttemptEvent]:
    """Return the events for a task without a known supervisor. No supervisor keeps its fence, so no fence
    passes. The attempt is stopped if no other task could take this one's place, or if the remaining processes
    do not die in time. A doubt alone stops nothing.
    """
    node, message = observation.node, observation.raw[:MAX_OUTCOME_MESSAGE]
    running.leases.note_trouble(attempt.attempt_id, node, message)
    is_to_stop = (
        observation.evidence.rule.stops_attempt
        and attempt.state is not AttemptState.STOPPING
        and not _is_worth_waiting(clock, running, engine, job, attempt, node)
    )
    is_known = node in attempt.orphaned_nodes and (
        observation.evidence.rule.is_hearsay or node not in attempt.doubted_nodes
    )
    if is_known and not is_to_stop:
        return []
    replacement = attempt.replacement_on(node)
    return [
        TaskOrphaned(
            node, message, replacement=replacement, is_to_stop=is_to_stop, evidence=observation.evidence
        )
    ]


def _record_orphan(
    records: Records, running: RunningAttempts, engine: Engine, tx: Tx, attempt_id: str, event: TaskOrphaned
) -> Attempt | None:
    """Record the orphan. Whether the attempt is stopped depends on the attempt as it is now, not as it was
    before the look.
    """
    attempt = tx.attempts.get(attempt_id)
    job = tx.jobs.get(attempt.job_id) if attempt is not None else None
    if event.is_to_stop and attempt is not None and job is not None:
        is_to_stop = not _is_worth_waiting(records.clock, running, engine, job, attempt, event.node)
        event = msgspec.structs.replace(event, is_to_stop=is_to_stop)
    return records.recorder.advance(tx, attempt_id, event)


def explains_failures(
    clock: Clock, running: RunningAttempts, engine: Engine, job: Job, attempt: Attempt, node: str
) -> bool:
    """Whether another node explains failed ranks on `node`: a task there is dying and its replacement is
    awaited, or the node went silent, as a machine that is switched off does. This holds for a minute at most.
    Silence excuses one failure more than tasks were replaced. Later failures count against the job's retries.
    """
    dying = set(attempt.orphans_left)
    if attempt.num_excused <= len(attempt.replacements):
        dying |= set(running.leases.silent_nodes(attempt, MISSED_S))
    return any(_is_worth_waiting(clock, running, engine, job, attempt, name) for name in dying - {node})


def _is_worth_waiting(
    clock: Clock, running: RunningAttempts, engine: Engine, job: Job, attempt: Attempt, node: str
) -> bool:
    """Whether the remaining processes of this task may still die in time, so that the others can go on with a
    task in its place.
    """
    lost = _outcome(clock, attempt, node, EndKind.LOST, "")
    return (
        running.leases.task_silence_s(attempt, node) <= REPLACEMENT_PATIENCE_S
        and not set(attempt.nodes_left) <= {node, *attempt.orphaned_nodes}
        and can_replace(clock, engine, job, attempt, lost)
    )


def _supervised_again(
    running: RunningAttempts, attempt: Attempt, node: str, evidence: Evidence
) -> list[AttemptEvent]:
    """Return the events if the evidence contradicts that the task has no supervisor. Its fence counts from
    now on.
    """
    if node not in attempt.doubts_withdrawn_by(evidence):
        return []
    running.leases.note_alive(attempt.attempt_id, node, attempt.replacement_on(node), is_hearsay=True)
    running.leases.note_trouble(attempt.attempt_id, node, None)
    return [OrphanCleared(node, attempt.replacement_on(node), evidence)]


def _may_be_starting(attempt: Attempt, node: str) -> bool:
    return _is_awaited(attempt, node) or attempt.state is AttemptState.STARTING


def _is_awaited(attempt: Attempt, node: str) -> bool:
    """Whether the task is to begin in place of a lost one, beside tasks that live."""
    return attempt.state is AttemptState.RUNNING and node in attempt.nodes_to_start


def _unlisted(clock: Clock, engine: Engine, attempt: Attempt, node: str) -> TaskOutcome:
    """Return the outcome of a task that held resources and is not listed: the engine says that nothing of it
    runs.
    """
    kind = EndKind.STOPPED if attempt.state is AttemptState.STOPPING else EndKind.LOST
    return _outcome(clock, attempt, node, kind, f"{engine.name} has no trace of it")


def _outcome(clock: Clock, attempt: Attempt, node: str, kind: EndKind, message: str) -> TaskOutcome:
    """Return the outcome of an end that no process on the node could record."""
    return TaskOutcome(
        attempt_id=attempt.attempt_id,
        epoch=attempt.epoch,
        node=node,
        kind=kind,
        ended_at=clock.now(),
        message=message,
        replacement=attempt.replacement_on(node),
    )


async def _replace_lost(upkeep: Upkeep, inputs: SubmissionInputs, attempt: Attempt) -> None:
    """Start tasks in place of those that were just lost, and tell the other nodes of the next rank group."""
    upkeep.running.rendezvous.notify(attempt.attempt_id)
    if attempt.state is AttemptState.RUNNING and attempt.nodes_to_start:
        await launch(upkeep, inputs, attempt.attempt_id)


async def _submit_again(upkeep: Upkeep, inputs: SubmissionInputs, job: Job, attempt: Attempt) -> None:
    """Submit once more. If that has failed for longer than the fence, give up, so that the job is tried
    elsewhere. The other tasks of a running attempt wait less long for the one they lack.
    """
    is_starting = attempt.state is AttemptState.STARTING
    limit_s = spec_of(job).fence + FENCE_MARGIN_S if is_starting else REPLACEMENT_PATIENCE_S
    nodes = attempt.nodes_left if is_starting else attempt.nodes_to_start
    if all(upkeep.running.leases.task_silence_s(attempt, node) <= limit_s for node in nodes):
        await launch(upkeep, inputs, attempt.attempt_id)
        return
    if attempt.attempt_id in upkeep.running.submitting:
        return
    upkeep.running.submitting.add(attempt.attempt_id)
    try:
        # Look again under the mark, because no submission can be under way while it is set.
        seen = await _observe(upkeep.link.engine)
        listed = {} if seen is None else seen.get(attempt.attempt_id, {})
        if seen is not None and not (is_starting and listed):
            for event in _given_up(upkeep.records.clock, upkeep.link.engine, attempt, nodes, listed):
                await _advance(upkeep, attempt, event, has_survivors=False)
    finally:
        upkeep.running.submitting.discard(attempt.attempt_id)


def _given_up(
    clock: Clock, engine: Engine, attempt: Attempt, nodes: tuple[str, ...], listed: dict[str, Observation]
) -> list[AttemptEvent]:
    """Return the events for tasks that could not be handed over: they are over. A task that was handed over
    and did not begin might still begin, so it is stopped.
    """
    observations = {node: _present(attempt, listed, node) for node in nodes}
    over = [
        TaskEnded(_unlisted(clock, engine, attempt, node))
        for node, observation in observations.items()
        if observation is None
    ]
    late = ", ".join(node for node, observation in observations.items() if _is_pending(observation))
    because = f"{late}: the task in place of a lost one did not begin"
    stop = StopRequested(reason=EndReason.LOST, by="the control plane", because=because)
    return [*over, *([stop] if late else [])]


async def _fence(upkeep: Upkeep, job: Job, attempt: Attempt, observed: dict[str, Observation]) -> Attempt:
    """Record that the fences of silent nodes have passed. Only for tasks that the engine cannot see. The
    attempt is marked like a submission, so that none begins before this is recorded.
    """
    if attempt.attempt_id in upkeep.running.submitting:
        return attempt
    silent = upkeep.running.leases.fenced_nodes(attempt, spec_of(job).fence)
    fenced = tuple(node for node in silent if not _is_pending(observed.get(node)))
    if fenced != silent:
        # Its supervisor may hang and wake up after any fence. A stop before it begins prevents that.
        await _stop(upkeep.link.engine, attempt, 0.0)
    if not fenced:
        return attempt
    upkeep.running.submitting.add(attempt.attempt_id)
    try:
        for event in _fenced(upkeep.records.clock, attempt, fenced):
            attempt = await _advance(upkeep, attempt, event, evidence=Evidence.FENCED)
    finally:
        upkeep.running.submitting.discard(attempt.attempt_id)
    return attempt


def _fenced(clock: Clock, attempt: Attempt, nodes: tuple[str, ...]) -> list[AttemptEvent]:
    """Return the events for fenced nodes. One silent node ends the whole gang, as any failure would: the
    others are seen and can be stopped.
    """
    if nodes == attempt.nodes_left:
        return [FenceExpired()]
    message = "no sign of life for longer than its fence"
    return [TaskEnded(_outcome(clock, attempt, node, EndKind.FENCED, message)) for node in nodes]


def _overdue(running: RunningAttempts, job: Job, attempt: Attempt) -> list[AttemptEvent]:
    """Return a stop if the time limit passed long ago. A supervisor keeps its own time limit; this is for one
    that hangs.
    """
    limit_s = job.request.time_limit_s
    if limit_s is None or attempt.state is not AttemptState.RUNNING:
        return []
    if running.leases.ran_for_s(attempt.attempt_id) < limit_s + LATE_STOP_S:
        return []
    return [StopRequested(reason=EndReason.TIME_LIMIT, by="the time limit")]


def _is_fenced(running: RunningAttempts, tx: Tx, attempt_id: str, event: AttemptEvent) -> bool:
    """Whether the nodes are still fenced, checked in the transaction. A supervisor that was frozen for longer
    than its fence may have spoken since the look. It was told to go on then, or it will be told that the task
    has ended.
    """
    attempt = tx.attempts.get(attempt_id)
    job = tx.jobs.get(attempt.job_id) if attempt is not None else None
    if attempt is None or job is None:
        return False
    gone = (event.outcome.node,) if isinstance(event, TaskEnded) else attempt.nodes_left
    return set(gone) <= set(running.leases.fenced_nodes(attempt, spec_of(job).fence))


async def _advance(
    upkeep: Upkeep,
    attempt: Attempt,
    event: AttemptEvent,
    *,
    has_survivors: bool = True,
    evidence: Evidence = Evidence.ENDED,
) -> Attempt:
    """Record the event. `has_survivors`: other nodes would go on with a task in place of a lost one.
    `evidence`: of an end.
    """

    def record(tx: Tx) -> Attempt | None:
        if evidence is Evidence.FENCED and not _is_fenced(upkeep.running, tx, attempt.attempt_id, event):
            return None
        if isinstance(event, TaskEnded) and has_survivors:
            return record_end(
                upkeep.records,
                upkeep.running,
                upkeep.link.engine,
                tx,
                attempt.attempt_id,
                event.outcome,
                is_found_again=True,
                evidence=evidence,
            )
        if isinstance(event, TaskOrphaned):
            return _record_orphan(
                upkeep.records, upkeep.running, upkeep.link.engine, tx, attempt.attempt_id, event
            )
        return upkeep.records.recorder.advance(tx, attempt.attempt_id, event)

    after = await upkeep.records.store.write(record) or attempt
    if attempt.attempt_id in upkeep.running.lost_tasks:
        upkeep.signals.plan.set()
    return after


async def cancel(engine: Engine, job: Job, attempt: Attempt) -> None:
    """Tell the engine to stop the attempt. Repeated at every look until the end is seen."""
    await _stop(engine, attempt, spec_of(job).grace)


async def _stop(engine: Engine, attempt: Attempt, grace_s: float) -> None:
    try:
        await engine.cancel(attempt.attempt_id, grace_s)
    except EngineUnreachable as error:
        log.warning("cancel.later", attempt=attempt.attempt_id, error=error.message)


async def _clean_up(
    engine: Engine, attempt_id: str, attempt: Attempt | None, observed: dict[str, Observation]
) -> None:
    """Clean up what the engine has and the records do not hold. `attempt`: as recorded after the engine was
    asked.
    """
    if attempt is None:
        # A control plane with another database started it, or this database lost it: not ours to stop.
        log.error("engine.unknown_attempt", attempt=attempt_id, nodes=sorted(observed))
        return
    if attempt.state is not AttemptState.ENDED:
        return  # placed after the attempts were read: next time
    try:
        if all(seen.evidence is Evidence.ENDED for seen in observed.values()):
            await engine.forget(attempt_id)
        elif isinstance(engine, SupportsReaping):
            await engine.reap(attempt_id)
        else:
            log.warning("engine.stray", attempt=attempt_id)
            await engine.cancel(attempt_id, 0.0)
    except EngineUnreachable as error:
        log.warning("cleanup.later", attempt=attempt_id, error=error.message)
