"""Answer a supervisor's renewal: renew the lease, record a start or an end, reply with what to do.

A renewal also carries metrics. They are checked and stored as far as the store takes them, and are never a
reason to doubt a lease.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import msgspec
import structlog

from shoal.clock import Clock
from shoal.control.capabilities import Records, SubmissionInputs, Upkeep
from shoal.control.job_specs import spec_of
from shoal.control.loops.replace import record_end
from shoal.control.loops.watch import check_attempt, explains_failures
from shoal.control.memory.running import RunningAttempts
from shoal.control.record import REPORT_PATIENCE_S, batched
from shoal.control.services import replicas
from shoal.control.services.state import ServiceState
from shoal.curve import MAX_X, Samples
from shoal.engines.base import Engine
from shoal.errors import StateError, StoreUnavailable
from shoal.model.attempt import Attempt, AttemptState
from shoal.model.moves import (
    REASON_OF_KIND,
    AttemptEvent,
    RanksRestarted,
    TaskEnded,
    TaskRecovered,
    TaskStarted,
)
from shoal.model.retry import may_restart_in_place
from shoal.store import Store, Tx
from shoal.wire import Renewal, RenewalReply, TaskOutcome

MAX_NAME = 100
MAX_SERIES, MAX_POINTS = 256, 4096
"""Of one message. A supervisor sends less."""

MAX_AT_ONCE = 32
"""Series in one transaction, each with up to 512 rows to write again."""

log = structlog.get_logger()


async def record_metrics(records: Records, attempt: Attempt, node: str, samples: Iterable[Samples]) -> None:
    """Store the valid samples. A store that fails is no reason to refuse the sign of life."""
    kept = valid_samples(samples)
    if not kept:
        return
    now, lost = records.clock.now(), 0
    try:
        for some in batched(kept, MAX_AT_ONCE):
            add = partial(_add_metrics, attempt, node, some, now)
            lost += await records.store.write(add, patience_s=REPORT_PATIENCE_S)
    except StoreUnavailable as error:
        log.warning("metrics.lost", attempt_id=attempt.attempt_id, node=node, error=error.message)
        return
    if lost:
        log.warning("metrics.too_many_series", job_id=attempt.job_id, node=node, points=lost)


def _add_metrics(attempt: Attempt, node: str, some: Iterable[Samples], now: float, tx: Tx) -> int:
    return tx.metrics.add(attempt.job_id, attempt.epoch, node, some, now)


def valid_samples(samples: Iterable[Samples]) -> list[Samples]:
    """Return the samples whose names a table can show and whose numbers are in range."""
    kept: list[Samples] = []
    left = MAX_POINTS
    for series in samples:
        has_name = 0 < len(series.name) <= MAX_NAME and series.name.isprintable()
        is_rank = series.rank is None or 0 <= series.rank < MAX_X
        points = series.points if series.newest is None else (*series.points, series.newest)
        if not (has_name and is_rank and all(0 <= point.x <= MAX_X for point in points)):
            continue
        left -= len(series.points)
        if left < 0 or len(kept) >= MAX_SERIES:
            break
        kept.append(series)
    return kept


MAX_WAIT_S = 8.0
"""Shorter than a supervisor waits for a reply."""


class StaleRenewal(StateError):
    """The supervisor that renews is not, or no longer, the one that may run. A passing conflict in the store
    is not this.
    """

    code = "state.stale_renewal"


async def renew(
    upkeep: Upkeep, inputs: SubmissionInputs, services: ServiceState, renewal: Renewal
) -> RenewalReply:
    """Note the sign of life. `StaleRenewal`: the attempt is over or another task has its place; stop at once.

    When this returns, an outcome is on disk. Repeating any renewal is harmless.
    """
    if renewal.failure is not None:
        await _find_cause_first(upkeep, inputs, renewal, renewal.failure)
    attempt = await _receive(upkeep, services, renewal)
    if attempt.state is AttemptState.RUNNING and attempt.nodes_to_start:
        upkeep.signals.watch.set()
    if renewal.wait_s > 0 and not _has_news(upkeep.running, attempt, renewal):
        await upkeep.running.rendezvous.wait_for_news(renewal.attempt_id, min(renewal.wait_s, MAX_WAIT_S))
        attempt = await _record_if_news(upkeep.records, upkeep.running, upkeep.link.engine, renewal)
    reply = await _reply(upkeep.records.store, upkeep.running, attempt, renewal.node)
    return msgspec.structs.replace(reply, control_urls=inputs.leadership.announced_urls)


async def _find_cause_first(
    upkeep: Upkeep, inputs: SubmissionInputs, renewal: Renewal, failure: TaskOutcome
) -> None:
    """Look for the cause before a failure is judged. Ranks fail because those of a lost task are gone, and
    report it before any loop has looked; or because a rank of another node was killed, whose supervisor may
    report later.
    """
    attempt_id = renewal.attempt_id
    attempt = await upkeep.records.store.read(
        lambda tx: _current_attempt(tx.attempts.get(attempt_id), renewal)
    )
    if renewal.rendezvous_round != attempt.rendezvous_round:
        return
    upkeep.running.rank_failures.note(failure, renewal.rendezvous_round)
    await upkeep.running.single_flight.run(
        attempt_id, attempt.rendezvous_round, lambda: check_attempt(upkeep, inputs, attempt_id)
    )
    if failure.gives_up and len(attempt.allocation) > 1:
        await upkeep.running.rank_failures.wait_for_others(attempt, failure)


async def _reply(store: Store, running: RunningAttempts, attempt: Attempt, node: str) -> RenewalReply:
    port = running.rendezvous.port(attempt.attempt_id, attempt.rendezvous_round)
    drill = running.drills.command_for(attempt, node)
    if attempt.state is not AttemptState.STOPPING:
        is_after_hang = attempt.failure is not None and attempt.failure.is_hang
        return RenewalReply(
            rendezvous_round=attempt.rendezvous_round,
            master_port=port,
            is_after_hang=is_after_hang,
            drill=drill,
            should_sleep=running.replicas.sleep_order(attempt.attempt_id),
        )
    job = await store.read(lambda tx: tx.jobs.get(attempt.job_id))
    assert job is not None
    return RenewalReply(
        should_stop=True,
        grace_s=spec_of(job).grace,
        because=attempt.message,
        rendezvous_round=attempt.rendezvous_round,
        master_port=port,
    )


def _has_news(running: RunningAttempts, attempt: Attempt, renewal: Renewal) -> bool:
    """Whether there is something to tell that the supervisor does not know."""
    port = running.rendezvous.port(attempt.attempt_id, attempt.rendezvous_round)
    return (
        attempt.state is AttemptState.STOPPING
        or attempt.rendezvous_round > renewal.rendezvous_round
        or port not in (None, renewal.master_port)
        or running.drills.command_for(attempt, renewal.node) is not None
        or running.replicas.sleep_order(attempt.attempt_id) is not None
    )


async def _receive(upkeep: Upkeep, services: ServiceState, renewal: Renewal) -> Attempt:
    task_key = renewal.attempt_id, renewal.node, renewal.replacement
    with upkeep.running.leases.speaking(*task_key):
        attempt = await _record_if_news(upkeep.records, upkeep.running, upkeep.link.engine, renewal)
        upkeep.running.leases.note_alive(*task_key)
    if attempt.rendezvous_round > renewal.rendezvous_round:
        upkeep.running.rendezvous.notify(attempt.attempt_id)
    if renewal.master_port is not None and renewal.node == attempt.node_names[0]:
        upkeep.running.rendezvous.announce(attempt.attempt_id, renewal.rendezvous_round, renewal.master_port)
    if upkeep.running.drills.note_renewal(renewal, upkeep.records.clock.now()):
        upkeep.running.rendezvous.notify(attempt.attempt_id)
    upkeep.running.worlds.note_renewal(renewal)
    if renewal.saved_s is not None and renewal.saved_s >= 0:
        upkeep.running.checkpoint_times.note_checkpoint(
            renewal.attempt_id, upkeep.records.clock.now() - renewal.saved_s
        )
    if renewal.replica_status is not None:
        await replicas.record_status(
            upkeep.records, upkeep.running, services, attempt, renewal.replica_status
        )
    if renewal.metrics:
        await record_metrics(upkeep.records, attempt, renewal.node, renewal.metrics)
    return attempt


async def _record_if_news(
    records: Records, running: RunningAttempts, engine: Engine, renewal: Renewal
) -> Attempt:
    """Return the attempt with what the renewal reports. If the renewal surely has news, it is checked and
    recorded in one transaction, without a read before it. The same holds if the end of the task may be
    recorded at this moment.
    """
    task_key = renewal.attempt_id, renewal.node, renewal.replacement
    if renewal.outcome is None and renewal.failure is None and running.leases.has_sign_of_life(*task_key):
        attempt = await records.store.read(
            lambda tx: _current_attempt(tx.attempts.get(renewal.attempt_id), renewal)
        )
        if _unrecorded_event(attempt, renewal) is None and not running.leases.is_overdue(*task_key):
            return attempt
    is_urgent = renewal.outcome is not None or renewal.failure is not None
    patience_s = 0.0 if is_urgent else REPORT_PATIENCE_S
    return await records.store.write(
        lambda tx: _record(records, running, engine, tx, renewal), patience_s=patience_s
    )


def _record(records: Records, running: RunningAttempts, engine: Engine, tx: Tx, renewal: Renewal) -> Attempt:
    """Return the attempt with what the renewal reports."""
    attempt = _current_attempt(tx.attempts.get(renewal.attempt_id), renewal)
    event = _unrecorded_event(attempt, renewal) or _regrouping(
        records.clock, running, engine, tx, attempt, renewal
    )
    if isinstance(event, TaskEnded):
        return record_end(records, running, engine, tx, renewal.attempt_id, event.outcome) or attempt
    return attempt if event is None else records.recorder.advance(tx, renewal.attempt_id, event) or attempt


def _regrouping(
    clock: Clock, running: RunningAttempts, engine: Engine, tx: Tx, attempt: Attempt, renewal: Renewal
) -> AttemptEvent | None:
    """Return the event for failed ranks: start all of them again if the job's retries allow it, or if another
    task explains the failure.
    """
    if renewal.failure is None:
        return None
    if len(attempt.allocation) == 1:
        # Its supervisor knows how often it may restart its ranks, and need not ask.
        is_new = renewal.rendezvous_round > attempt.rendezvous_round
        return RanksRestarted(attempt.rendezvous_round, renewal.failure) if is_new else None
    if renewal.rendezvous_round == attempt.rendezvous_round - 1:
        return RanksRestarted(
            renewal.rendezvous_round, renewal.failure
        )  # no further rank group, but perhaps a better cause
    if renewal.rendezvous_round != attempt.rendezvous_round or attempt.outcomes:
        return None
    job = tx.jobs.get(attempt.job_id)
    assert job is not None
    if explains_failures(clock, running, engine, job, attempt, renewal.node):
        return RanksRestarted(renewal.rendezvous_round, renewal.failure, is_excused=True)
    reason = REASON_OF_KIND[renewal.failure.kind]
    if not may_restart_in_place(job, attempt, reason, running.rank_failures.cause(attempt, renewal.failure)):
        return None
    return RanksRestarted(renewal.rendezvous_round, renewal.failure)


def _current_attempt(attempt: Attempt | None, renewal: Renewal) -> Attempt:
    if attempt is None or renewal.node not in attempt.node_names:
        raise StaleRenewal(f"attempt {renewal.attempt_id} was never placed on {renewal.node}")
    if attempt.epoch != renewal.epoch:
        raise StaleRenewal(f"epoch {renewal.epoch} is stale; the attempt has epoch {attempt.epoch}")
    replacement = attempt.replacement_on(renewal.node)
    if renewal.replacement != replacement:
        raise StaleRenewal(
            f"replacement {renewal.replacement} is stale; the task is replacement {replacement}"
        )
    if attempt.state is AttemptState.ENDED and renewal.outcome is None:
        raise StaleRenewal(f"attempt {renewal.attempt_id} has ended: {attempt.reason}")
    return attempt


def _unrecorded_event(attempt: Attempt, renewal: Renewal) -> AttemptEvent | None:
    """Return what the renewal reports and the attempt does not record."""
    if renewal.outcome is not None:
        outcome = renewal.outcome
        if (outcome.attempt_id, outcome.epoch, outcome.node, outcome.replacement) != (
            renewal.attempt_id,
            renewal.epoch,
            renewal.node,
            renewal.replacement,
        ):
            raise StaleRenewal("the outcome is not about the attempt and node that report it")
        return TaskEnded(outcome)
    if renewal.started_at is not None and renewal.node not in attempt.started_nodes:
        return TaskStarted(renewal.node, renewal.replacement)
    return _recovery(attempt, renewal)


def _recovery(attempt: Attempt, renewal: Renewal) -> AttemptEvent | None:
    recovery = renewal.recovery
    if recovery is None or (recovery.rendezvous_round, recovery.node) != (
        attempt.rendezvous_round,
        renewal.node,
    ):
        return None
    is_known = any(
        (recorded.rendezvous_round, recorded.node) == (recovery.rendezvous_round, recovery.node)
        for recorded in attempt.recoveries
    )
    return None if is_known else TaskRecovered(recovery)
