"""What supervisors say: renew the lease, record a start or an end, answer with an order."""

from __future__ import annotations

import msgspec

from shoal.control import metrics
from shoal.control.core import NEWS_PATIENCE_S, Core
from shoal.control.frozen import spec_of
from shoal.control.replace import record_end
from shoal.control.services import replicas
from shoal.control.watch import explains_failures, look_at
from shoal.errors import StateError
from shoal.model.attempt import Attempt, AttemptState
from shoal.model.moves import REASON_OF_KIND, AttemptEvent, NodeEnded, Recovered, Regrouped, Started
from shoal.model.retry import may_regroup
from shoal.store import Tx
from shoal.wire import NodeOutcome, Renewal, RenewalAnswer

MAX_WAIT_S = 8.0
"""Less than a supervisor waits for an answer."""


class StaleRenewal(StateError):
    """Who renews is not, or no longer, the one that may run. A passing conflict in the store is not this."""

    code = "state.stale_renewal"


async def renew(core: Core, renewal: Renewal) -> RenewalAnswer:
    """Note the sign of life. `StaleRenewal`: the attempt is over or another has its place; stop at once.

    An outcome is on disk here when this returns. Repeating any renewal is harmless.
    """
    if renewal.failure is not None:
        await _look_first(core, renewal, renewal.failure)
    attempt = await _heard(core, renewal)
    if attempt.state is AttemptState.RUNNING and attempt.nodes_to_start:
        core.watcher.set()
    if renewal.wait_s > 0 and not _has_news(core, attempt, renewal):
        await core.meetings.news(renewal.attempt_id, min(renewal.wait_s, MAX_WAIT_S))
        attempt = await _noted(core, renewal)
    told = await _answer(core, attempt, renewal.node)
    return msgspec.structs.replace(told, control_urls=core.urls_to_tell)


async def _look_first(core: Core, renewal: Renewal, failure: NodeOutcome) -> None:
    """Ranks fail because those of a lost share are gone, and say so sooner than anybody has looked; or
    because a rank of another node was killed, whose supervisor may report later.
    """
    own = renewal.attempt_id
    attempt = await core.store.read(lambda tx: _current(tx.attempts.get(own), renewal))
    if renewal.generation != attempt.generation:
        return
    core.failures.note(failure, renewal.generation)
    await core.looks.once(own, attempt.generation, lambda: look_at(core, own))
    if failure.gives_up and len(attempt.allocation) > 1:
        await core.failures.hear_others(attempt, failure)


async def _answer(core: Core, attempt: Attempt, node: str) -> RenewalAnswer:
    port = core.meetings.port(attempt.attempt_id, attempt.generation)
    drill = core.drills.order_for(attempt, node)
    if attempt.state is not AttemptState.STOPPING:
        is_after_hang = attempt.failure is not None and attempt.failure.is_hang
        return RenewalAnswer(
            generation=attempt.generation,
            master_port=port,
            is_after_hang=is_after_hang,
            drill=drill,
            should_sleep=core.services.sleep_order(attempt.attempt_id),
        )
    job = await core.store.read(lambda tx: tx.jobs.get(attempt.job_id))
    assert job is not None
    return RenewalAnswer(
        should_stop=True,
        grace_s=spec_of(job).grace,
        because=attempt.message,
        generation=attempt.generation,
        master_port=port,
    )


def _has_news(core: Core, attempt: Attempt, renewal: Renewal) -> bool:
    """Whether there is something to tell that the one who asks does not know."""
    port = core.meetings.port(attempt.attempt_id, attempt.generation)
    return (
        attempt.state is AttemptState.STOPPING
        or attempt.generation > renewal.generation
        or port not in (None, renewal.master_port)
        or core.drills.order_for(attempt, renewal.node) is not None
        or core.services.sleep_order(attempt.attempt_id) is not None
    )


async def _heard(core: Core, renewal: Renewal) -> Attempt:
    own = renewal.attempt_id, renewal.node, renewal.incarnation
    with core.leases.speaking(*own):
        attempt = await _noted(core, renewal)
        core.leases.heard(*own)
    if attempt.generation > renewal.generation:
        core.meetings.tell(attempt.attempt_id)
    if renewal.master_port is not None and renewal.node == attempt.node_names[0]:
        core.meetings.say(attempt.attempt_id, renewal.generation, renewal.master_port)
    if core.drills.heard(renewal, core.clock.now()):
        core.meetings.tell(attempt.attempt_id)
    core.worlds.heard(renewal)
    if renewal.saved_s is not None and renewal.saved_s >= 0:
        core.checkpoints.heard(renewal.attempt_id, core.clock.now() - renewal.saved_s)
    if renewal.serving is not None:
        await replicas.heard(core, attempt, renewal.serving)
    if renewal.metrics:
        await metrics.keep(core, attempt, renewal.node, renewal.metrics)
    return attempt


async def _noted(core: Core, renewal: Renewal) -> Attempt:
    """The attempt with what the renewal tells. Whoever surely has news is looked at where it is written down:
    one transaction, and no read before it. So is one whose end may be being recorded meanwhile.
    """
    own = renewal.attempt_id, renewal.node, renewal.incarnation
    if renewal.outcome is None and renewal.failure is None and core.leases.knows(*own):
        attempt = await core.store.read(lambda tx: _current(tx.attempts.get(renewal.attempt_id), renewal))
        if _news(attempt, renewal) is None and not core.leases.is_overdue(*own):
            return attempt
    is_urgent = renewal.outcome is not None or renewal.failure is not None
    patience_s = 0.0 if is_urgent else NEWS_PATIENCE_S
    return await core.store.write(lambda tx: _record(core, tx, renewal), patience_s=patience_s)


def _record(core: Core, tx: Tx, renewal: Renewal) -> Attempt:
    """The attempt with what the renewal tells."""
    attempt = _current(tx.attempts.get(renewal.attempt_id), renewal)
    event = _news(attempt, renewal) or _regrouping(core, tx, attempt, renewal)
    if isinstance(event, NodeEnded):
        return record_end(core, tx, renewal.attempt_id, event.outcome) or attempt
    return attempt if event is None else core.recorder.advance(tx, renewal.attempt_id, event) or attempt


def _regrouping(core: Core, tx: Tx, attempt: Attempt, renewal: Renewal) -> AttemptEvent | None:
    """Ranks failed: start them all anew, if the job's retries allow it, or another share explains it."""
    if renewal.failure is None:
        return None
    if len(attempt.allocation) == 1:
        # Its supervisor was told how often it may, and needs to ask nobody.
        is_new = renewal.generation > attempt.generation
        return Regrouped(attempt.generation, renewal.failure) if is_new else None
    if renewal.generation == attempt.generation - 1:
        return Regrouped(renewal.generation, renewal.failure)  # no other group, but perhaps a better cause
    if renewal.generation != attempt.generation or attempt.outcomes:
        return None
    job = tx.jobs.get(attempt.job_id)
    assert job is not None
    if explains_failures(core, job, attempt, renewal.node):
        return Regrouped(renewal.generation, renewal.failure, is_excused=True)
    reason = REASON_OF_KIND[renewal.failure.kind]
    if not may_regroup(job, attempt, reason, core.failures.cause(attempt, renewal.failure)):
        return None
    return Regrouped(renewal.generation, renewal.failure)


def _current(attempt: Attempt | None, renewal: Renewal) -> Attempt:
    if attempt is None or renewal.node not in attempt.node_names:
        raise StaleRenewal(f"attempt {renewal.attempt_id} was never placed on {renewal.node}")
    if attempt.epoch != renewal.epoch:
        raise StaleRenewal(f"epoch {renewal.epoch} is stale; the attempt has epoch {attempt.epoch}")
    own = attempt.incarnation(renewal.node)
    if renewal.incarnation != own:
        raise StaleRenewal(f"incarnation {renewal.incarnation} is stale; the share has incarnation {own}")
    if attempt.state is AttemptState.ENDED and renewal.outcome is None:
        raise StaleRenewal(f"attempt {renewal.attempt_id} has ended: {attempt.reason}")
    return attempt


def _news(attempt: Attempt, renewal: Renewal) -> AttemptEvent | None:
    """What the renewal tells that is not recorded yet."""
    if renewal.outcome is not None:
        outcome = renewal.outcome
        if (outcome.attempt_id, outcome.epoch, outcome.node, outcome.incarnation) != (
            renewal.attempt_id,
            renewal.epoch,
            renewal.node,
            renewal.incarnation,
        ):
            raise StaleRenewal("the outcome is not about the attempt and node that report it")
        return NodeEnded(outcome)
    if renewal.started_at is not None and renewal.node not in attempt.started_nodes:
        return Started(renewal.node, renewal.incarnation)
    return _recovery(attempt, renewal)


def _recovery(attempt: Attempt, renewal: Renewal) -> AttemptEvent | None:
    told = renewal.recovery
    if told is None or (told.generation, told.node) != (attempt.generation, renewal.node):
        return None
    is_known = any((one.generation, one.node) == (told.generation, told.node) for one in attempt.recoveries)
    return None if is_known else Recovered(told)
