"""Compare what the engine sees with what is recorded, and feed the differences in as events.

The order of reads matters. What holds resources is read first, the engine is asked second: an attempt
that held something then, is not being submitted, and is not listed now, does not run anywhere.
"""

from __future__ import annotations

import msgspec
import structlog

from shoal.control.core import Core
from shoal.control.frozen import spec_of
from shoal.control.launch import launch
from shoal.control.leases import FENCE_MARGIN_S
from shoal.control.refresh import refresh_nodes
from shoal.control.replace import can_replace, record_end
from shoal.engines.base import Observation, Sight, SupportsBurial
from shoal.errors import EngineUnreachable, StoreUnavailable
from shoal.model.attempt import Attempt, AttemptState, EndReason
from shoal.model.job import Job
from shoal.model.moves import (
    AttemptEvent,
    FencePassed,
    NodeEnded,
    OrphanCleared,
    Orphaned,
    Started,
    StopAsked,
)
from shoal.store import Tx
from shoal.wire import MAX_OUTCOME_MESSAGE, EndKind, NodeOutcome

log = structlog.get_logger()

Seen = dict[str, dict[str, Observation]]
REPLACED_S = 60.0
"""How long a share in place of a lost one may be on its way before its attempt is given up; and how long what
the lost one left may take to die."""
MISSED_S = 8.0
"""Who renews every five seconds and was not heard from for longer when its peers fail is why they do."""
LATE_STOP_S = 60.0
"""How long after a time limit the control plane steps in for a supervisor that did not."""


async def watch(core: Core) -> None:
    """One look at everything that runs or should."""
    holding = await core.store.read(lambda tx: tx.attempts.holding())
    core.leases.follow([attempt for _, attempt in holding])
    being_submitted = frozenset(core.submitting)
    seen = await _look(core)
    core.checkpoints.keep_only(attempt.attempt_id for _, attempt in holding)
    core.looks.keep_only(attempt.attempt_id for _, attempt in holding)
    core.meetings.keep_only(attempt.attempt_id for _, attempt in holding)
    core.drills.keep_only(attempt.attempt_id for _, attempt in holding)
    core.failures.keep_only(attempt.attempt_id for _, attempt in holding)
    core.worlds.keep_only(attempt.attempt_id for _, attempt in holding)
    core.services.keep_only(attempt.attempt_id for _, attempt in holding)
    failed: Exception | None = None
    for job, attempt in holding:
        if attempt.attempt_id in being_submitted:
            continue
        try:
            await _compare(core, job, attempt, seen)
        except StoreUnavailable:
            raise
        except Exception as error:
            # One attempt that cannot be judged must not keep the others from being watched.
            log.exception("watch.failed", attempt=attempt.attempt_id)
            failed = failed or error
    if seen is not None:
        others = sorted(seen.keys() - {attempt.attempt_id for _, attempt in holding})
        recorded = (
            await core.store.read(lambda tx: [tx.attempts.get(one) for one in others]) if others else []
        )
        for attempt_id, known in zip(others, recorded, strict=True):
            await _tidy(core, attempt_id, known, seen[attempt_id])
    if failed is not None:
        raise failed


async def look_at(core: Core, attempt_id: str) -> None:
    """Look for lost shares of one attempt of several nodes that runs, before its next turn comes."""
    found = await core.store.read(lambda tx: tx.attempts.with_jobs([attempt_id]))
    running = [(job, own) for job, own in found if own.state is AttemptState.RUNNING]
    for job, attempt in running if attempt_id not in core.submitting else ():
        if len(attempt.allocation) > 1:
            await _compare(core, job, attempt, await _look(core))


async def _look(core: Core) -> Seen | None:
    """What the engine lists, by attempt and node; None when it could not be asked."""
    try:
        observations = await core.engine.list_owned()
    except EngineUnreachable as error:
        log.warning("engine.unreachable", engine=core.engine.name, error=error.message)
        return None
    seen: Seen = {}
    for observation in observations:
        seen.setdefault(observation.attempt_id, {})[observation.node] = observation
    return seen


async def _compare(core: Core, job: Job, attempt: Attempt, seen: Seen | None) -> None:
    observed = None if seen is None else seen.get(attempt.attempt_id, {})
    if observed is not None and _should_submit(attempt, observed):
        await _hand_over(core, job, attempt)
    elif observed is not None:
        core.leases.trouble(attempt.attempt_id, "", None)
    events = [] if observed is None else _events(core, job, attempt, observed)
    known, num_ended = attempt, sum(isinstance(event, NodeEnded) for event in events)
    has_survivors = num_ended < len(attempt.nodes_left)
    is_mended = has_survivors and attempt.state is AttemptState.RUNNING and len(attempt.allocation) > 1
    if num_ended and (is_mended or _is_lost_unbegun(attempt, events)):
        await refresh_nodes(core)  # one that is gone is no place for another share, or for the next attempt
    for event in events:
        attempt = await _advance(core, attempt, event, has_survivors=has_survivors)
    attempt = await _fence(core, job, attempt, observed or {})
    if attempt.generation > known.generation:
        await _replace_lost(core, attempt)
    if attempt.state is AttemptState.STOPPING:
        await cancel(core, job, attempt)


def _is_lost_unbegun(attempt: Attempt, events: list[AttemptEvent]) -> bool:
    return attempt.state is AttemptState.STARTING and any(
        isinstance(event, NodeEnded) and event.outcome.kind is EndKind.LOST for event in events
    )


def _should_submit(attempt: Attempt, observed: dict[str, Observation]) -> bool:
    """Placed, but nobody has begun all of it: we, or a supervisor, were killed while it was handed over."""
    if attempt.state not in (AttemptState.STARTING, AttemptState.RUNNING):
        return False
    is_starting = attempt.state is AttemptState.STARTING
    seen = [
        _present(attempt, observed, node)
        for node in (attempt.nodes_left if is_starting else attempt.nodes_to_start)
    ]
    # One that waits in the cluster's own queue is handed over: asked again for each of hundreds, at every
    # look, the cluster would say that, and nobody would be watched meanwhile.
    # But those that run already wait for a lost one's successor for REPLACED_S alone.
    return any(
        share is None or (_is_pending(share) and not (share.is_queued and is_starting)) for share in seen
    )


def _present(attempt: Attempt, observed: dict[str, Observation], node: str) -> Observation | None:
    """What is seen of the node's present share: one that it replaces is nothing of it."""
    seen = observed.get(node)
    return None if seen is None or seen.incarnation < attempt.incarnation(node) else seen


def _is_pending(share: Observation | None) -> bool:
    return share is not None and share.sight is Sight.PENDING


def _events(core: Core, job: Job, attempt: Attempt, observed: dict[str, Observation]) -> list[AttemptEvent]:
    events: list[AttemptEvent] = []
    for node in attempt.nodes_left:
        seen = _present(attempt, observed, node)
        if seen is None and _may_be_on_its_way(attempt, node):
            continue  # just handed over again
        if seen is None:
            events.append(NodeEnded(_unlisted(core, attempt, node)))
        elif seen.incarnation > attempt.incarnation(node):
            continue  # begun after we read what holds resources: next time
        elif seen.sight in (Sight.ORPHANED, Sight.DOUBTFUL):
            # Before the epoch, which a share that cannot be read does not have: this ends nothing.
            events += _unkept(core, job, attempt, seen)
        elif seen.epoch != attempt.epoch:
            log.error("engine.stale_epoch", attempt=attempt.attempt_id, epoch=seen.epoch)
        elif seen.sight is Sight.ENDED and seen.outcome is not None:
            events.append(NodeEnded(seen.outcome))
        elif seen.sight is Sight.PENDING:
            core.leases.trouble(attempt.attempt_id, node, seen.raw, is_queued=seen.is_queued)
            # No silence: it cannot begin before it has asked us for its order. But others of a group that
            # runs wait for this one, and what it waits for may be held by them: see REPLACED_S.
            if seen.is_queued and not _is_awaited(attempt, node):
                core.leases.heard(attempt.attempt_id, node, seen.incarnation, is_hearsay=True)
        elif seen.sight is Sight.ALIVE:
            own, ago_s = attempt.attempt_id, seen.silent_s
            core.leases.heard(own, node, seen.incarnation, ago_s=ago_s, is_hearsay=seen.is_hearsay)
            core.leases.trouble(attempt.attempt_id, node, None)
            if not seen.is_hearsay:
                events += _kept_again(core, attempt, node)
            if seen.started_at is not None and node not in attempt.started_nodes:
                events.append(Started(node, seen.incarnation))
        elif seen.is_cleared and node in attempt.doubted_nodes:
            events += _kept_again(core, attempt, node, is_hearsay=True)
    return events + _overdue(core, job, attempt)


def _unkept(core: Core, job: Job, attempt: Attempt, seen: Observation) -> list[AttemptEvent]:
    """Nobody is known to keep the fence of this share: none passes. Its attempt is stopped where no other
    share could take its place, or what is left does not die in time; on a doubt alone nothing is.
    """
    node, told = seen.node, seen.raw[:MAX_OUTCOME_MESSAGE]
    core.leases.trouble(attempt.attempt_id, node, told)
    is_to_stop = (
        seen.sight is Sight.ORPHANED
        and attempt.state is not AttemptState.STOPPING
        and not _is_worth_waiting(core, job, attempt, node)
    )
    is_known = node in attempt.orphaned_nodes and (seen.is_hearsay or node not in attempt.doubted_nodes)
    if is_known and not is_to_stop:
        return []
    own = attempt.incarnation(node)
    return [Orphaned(node, told, incarnation=own, is_to_stop=is_to_stop, is_hearsay=seen.is_hearsay)]


def _record_orphan(core: Core, tx: Tx, attempt_id: str, event: Orphaned) -> Attempt | None:
    """Whether the rest is stopped is decided of the attempt as it is, not as it was before the look."""
    attempt = tx.attempts.get(attempt_id)
    job = tx.jobs.get(attempt.job_id) if attempt is not None else None
    if event.is_to_stop and attempt is not None and job is not None:
        is_to_stop = not _is_worth_waiting(core, job, attempt, event.node)
        event = msgspec.structs.replace(event, is_to_stop=is_to_stop)
    return core.recorder.advance(tx, attempt_id, event)


def explains_failures(core: Core, job: Job, attempt: Attempt, node: str) -> bool:
    """Whether ranks on `node` may have failed because those of a share do that dies, and is waited for, or
    of one that went silent, as a machine does that is switched off. Not for longer than a minute, and the
    second but once for each share that was replaced: what fails later costs the job's retries.
    """
    dying = set(attempt.orphans_left)
    if attempt.excused <= len(attempt.replacements):
        dying |= set(core.leases.silent_nodes(attempt, MISSED_S))
    return any(_is_worth_waiting(core, job, attempt, name) for name in dying - {node})


def _is_worth_waiting(core: Core, job: Job, attempt: Attempt, node: str) -> bool:
    """Whether what this share left may die yet, and the others go on with another in its place."""
    lost = _ended(core, attempt, node, EndKind.LOST, "")
    return (
        core.leases.share_silence_s(attempt, node) <= REPLACED_S
        and not set(attempt.nodes_left) <= {node, *attempt.orphaned_nodes}
        and can_replace(core, job, attempt, lost)
    )


def _kept_again(core: Core, attempt: Attempt, node: str, *, is_hearsay: bool = False) -> list[AttemptEvent]:
    """The fence of this share counts, from now on."""
    if node not in attempt.orphaned_nodes:
        return []
    core.leases.heard(attempt.attempt_id, node, attempt.incarnation(node), is_hearsay=True)
    core.leases.trouble(attempt.attempt_id, node, None)
    return [OrphanCleared(node, attempt.incarnation(node), is_hearsay=is_hearsay)]


def _may_be_on_its_way(attempt: Attempt, node: str) -> bool:
    return _is_awaited(attempt, node) or attempt.state is AttemptState.STARTING


def _is_awaited(attempt: Attempt, node: str) -> bool:
    """Whether it is to begin in place of a lost share, beside others that live."""
    return attempt.state is AttemptState.RUNNING and node in attempt.nodes_to_start


def _unlisted(core: Core, attempt: Attempt, node: str) -> NodeOutcome:
    """Not listed after it held resources: the engine says nothing of it runs."""
    kind = EndKind.STOPPED if attempt.state is AttemptState.STOPPING else EndKind.LOST
    return _ended(core, attempt, node, kind, f"{core.engine.name} has no trace of it")


def _ended(core: Core, attempt: Attempt, node: str, kind: EndKind, message: str) -> NodeOutcome:
    """An end that nobody on the node could write down."""
    return NodeOutcome(
        attempt_id=attempt.attempt_id,
        epoch=attempt.epoch,
        node=node,
        kind=kind,
        ended_at=core.clock.now(),
        message=message,
        incarnation=attempt.incarnation(node),
    )


async def _replace_lost(core: Core, attempt: Attempt) -> None:
    """Begin shares in place of those that were just found lost, and tell the others of the next group."""
    core.meetings.tell(attempt.attempt_id)
    if attempt.state is AttemptState.RUNNING and attempt.nodes_to_start:
        await launch(core, attempt.attempt_id)


async def _hand_over(core: Core, job: Job, attempt: Attempt) -> None:
    """Once more, unless that has failed for longer than the fence: then it is tried elsewhere. The others of
    an attempt that runs do not wait as long for the share that they lack.
    """
    is_starting = attempt.state is AttemptState.STARTING
    limit_s = spec_of(job).fence + FENCE_MARGIN_S if is_starting else REPLACED_S
    nodes = attempt.nodes_left if is_starting else attempt.nodes_to_start
    if all(core.leases.share_silence_s(attempt, node) <= limit_s for node in nodes):
        await launch(core, attempt.attempt_id)
        return
    if attempt.attempt_id in core.submitting:
        return
    core.submitting.add(attempt.attempt_id)
    try:
        # Looked at again under the mark, under which no submission can be on its way.
        seen = await _look(core)
        listed = {} if seen is None else seen.get(attempt.attempt_id, {})
        if seen is not None and not (is_starting and listed):
            for event in _given_up(core, attempt, nodes, listed):
                await _advance(core, attempt, event, has_survivors=False)
    finally:
        core.submitting.discard(attempt.attempt_id)


def _given_up(
    core: Core, attempt: Attempt, nodes: tuple[str, ...], listed: dict[str, Observation]
) -> list[AttemptEvent]:
    """What could not be handed over is over. What was taken and did not begin might still: it is stopped."""
    shares = {node: _present(attempt, listed, node) for node in nodes}
    over = [NodeEnded(_unlisted(core, attempt, node)) for node, share in shares.items() if share is None]
    late = ", ".join(node for node, share in shares.items() if _is_pending(share))
    told = f"{late}: the share in place of a lost one did not begin"
    stop = StopAsked(reason=EndReason.LOST, by="the control plane", because=told)
    return [*over, *([stop] if late else [])]


async def _fence(core: Core, job: Job, attempt: Attempt, observed: dict[str, Observation]) -> Attempt:
    """Only for what nobody can see. Marked like a submission, so that none begins before it is recorded."""
    if attempt.attempt_id in core.submitting:
        return attempt
    silent = core.leases.fenced_nodes(attempt, spec_of(job).fence)
    fenced = tuple(node for node in silent if not _is_pending(observed.get(node)))
    if fenced != silent:
        # Its supervisor may hang and wake up after any fence. Stopped before it begins, it never will.
        await _stop(core, attempt, 0.0)
    if not fenced:
        return attempt
    core.submitting.add(attempt.attempt_id)
    try:
        for event in _fenced(core, attempt, fenced):
            attempt = await _advance(core, attempt, event, fence_s=spec_of(job).fence)
    finally:
        core.submitting.discard(attempt.attempt_id)
    return attempt


def _fenced(core: Core, attempt: Attempt, nodes: tuple[str, ...]) -> list[AttemptEvent]:
    """One silent node ends the whole gang, as any failure would: the others are seen, and can be stopped."""
    if nodes == attempt.nodes_left:
        return [FencePassed()]
    told = "no sign of life for longer than its fence"
    return [NodeEnded(_ended(core, attempt, node, EndKind.FENCED, told)) for node in nodes]


def _overdue(core: Core, job: Job, attempt: Attempt) -> list[AttemptEvent]:
    """A supervisor keeps its own time limit; this is for one that hangs."""
    limit_s = job.request.time_limit_s
    if limit_s is None or attempt.state is not AttemptState.RUNNING:
        return []
    if core.leases.ran_for_s(attempt.attempt_id) < limit_s + LATE_STOP_S:
        return []
    return [StopAsked(reason=EndReason.TIME_LIMIT, by="the time limit")]


def _is_fenced(core: Core, tx: Tx, attempt_id: str, event: AttemptEvent, fence_s: float) -> bool:
    """Asked where it is recorded: one that was frozen for longer than its fence may have spoken since the
    look. It was told to go on then; or it will be told that this is its end.
    """
    attempt = tx.attempts.get(attempt_id)
    if attempt is None:
        return False
    gone = (event.outcome.node,) if isinstance(event, NodeEnded) else attempt.nodes_left
    return set(gone) <= set(core.leases.fenced_nodes(attempt, fence_s))


async def _advance(
    core: Core,
    attempt: Attempt,
    event: AttemptEvent,
    *,
    has_survivors: bool = True,
    fence_s: float | None = None,
) -> Attempt:
    """`has_survivors`: somebody is left who would go on with another share in place of a lost one. `fence_s`:
    there is no other evidence than that this has passed.
    """

    def record(tx: Tx) -> Attempt | None:
        if fence_s is not None and not _is_fenced(core, tx, attempt.attempt_id, event, fence_s):
            return None
        if isinstance(event, NodeEnded) and has_survivors:
            found = event.outcome
            return record_end(core, tx, attempt.attempt_id, found, is_found_again=True, fence_s=fence_s)
        if isinstance(event, Orphaned):
            return _record_orphan(core, tx, attempt.attempt_id, event)
        return core.recorder.advance(tx, attempt.attempt_id, event)

    after = await core.store.write(record) or attempt
    if attempt.attempt_id in core.lost:
        core.placer.set()
    return after


async def cancel(core: Core, job: Job, attempt: Attempt) -> None:
    """Tell the engine; repeated at every look until the end is seen."""
    await _stop(core, attempt, spec_of(job).grace)


async def _stop(core: Core, attempt: Attempt, grace_s: float) -> None:
    try:
        await core.engine.cancel(attempt.attempt_id, grace_s)
    except EngineUnreachable as error:
        log.warning("cancel.later", attempt=attempt.attempt_id, error=error.message)


async def _tidy(
    core: Core, attempt_id: str, attempt: Attempt | None, observed: dict[str, Observation]
) -> None:
    """The engine has something that holds nothing in our records. `attempt`: as they said after that."""
    if attempt is None:
        # Started by a control plane whose database this is not, or not any more: not ours to stop.
        log.error("engine.unknown_attempt", attempt=attempt_id, nodes=sorted(observed))
        return
    if attempt.state is not AttemptState.ENDED:
        return  # placed after we read what holds resources: next time
    try:
        if all(seen.sight is Sight.ENDED for seen in observed.values()):
            await core.engine.forget(attempt_id)
        elif isinstance(core.engine, SupportsBurial):
            await core.engine.bury(attempt_id)
        else:
            log.warning("engine.stray", attempt=attempt_id)
            await core.engine.cancel(attempt_id, 0.0)
    except EngineUnreachable as error:
        log.warning("tidy.later", attempt=attempt_id, error=error.message)
