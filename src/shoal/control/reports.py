"""What supervisors say: renew the lease, record a start or an end, answer with an order."""

from __future__ import annotations

from shoal.control.core import NEWS_PATIENCE_S, Core
from shoal.control.frozen import spec_of
from shoal.errors import StateError
from shoal.model.attempt import Attempt, AttemptState
from shoal.model.moves import AttemptEvent, NodeEnded, Started
from shoal.store import Tx
from shoal.wire import Renewal, RenewalAnswer


class StaleRenewal(StateError):
    """Who renews is not, or no longer, the one that may run. A passing conflict in the store is not this."""

    code = "state.stale_renewal"


async def renew(core: Core, renewal: Renewal) -> RenewalAnswer:
    """Note the sign of life. `StaleRenewal`: the attempt is over or another has its place; stop at once.

    An outcome is on disk here when this returns. Repeating any renewal is harmless.
    """
    attempt = await _noted(core, renewal)
    core.leases.heard(renewal.attempt_id, renewal.node)
    if renewal.saved_s is not None and renewal.saved_s >= 0:
        core.checkpoints.heard(renewal.attempt_id, core.clock.now() - renewal.saved_s)
    if attempt.state is not AttemptState.STOPPING:
        return RenewalAnswer()
    job = await core.store.read(lambda tx: tx.jobs.get(attempt.job_id))
    assert job is not None
    return RenewalAnswer(should_stop=True, grace_s=spec_of(job).grace, because=attempt.message)


async def _noted(core: Core, renewal: Renewal) -> Attempt:
    """The attempt with what the renewal tells. Whoever surely has news is looked at where it is written down:
    one transaction, and no read before it.
    """
    if renewal.outcome is None and core.leases.knows(renewal.attempt_id, renewal.node):
        attempt = await core.store.read(lambda tx: _current(tx.attempts.get(renewal.attempt_id), renewal))
        if _news(attempt, renewal) is None:
            return attempt
    patience_s = NEWS_PATIENCE_S if renewal.outcome is None else 0.0
    return await core.store.write(lambda tx: _record(core, tx, renewal), patience_s=patience_s)


def _record(core: Core, tx: Tx, renewal: Renewal) -> Attempt:
    """The attempt with what the renewal tells."""
    attempt = _current(tx.attempts.get(renewal.attempt_id), renewal)
    event = _news(attempt, renewal)
    return attempt if event is None else core.recorder.advance(tx, renewal.attempt_id, event) or attempt


def _current(attempt: Attempt | None, renewal: Renewal) -> Attempt:
    if attempt is None or renewal.node not in attempt.node_names:
        raise StaleRenewal(f"attempt {renewal.attempt_id} was never placed on {renewal.node}")
    if attempt.epoch != renewal.epoch:
        raise StaleRenewal(f"epoch {renewal.epoch} is stale; the attempt has epoch {attempt.epoch}")
    if attempt.state is AttemptState.ENDED and renewal.outcome is None:
        raise StaleRenewal(f"attempt {renewal.attempt_id} has ended: {attempt.reason}")
    return attempt


def _news(attempt: Attempt, renewal: Renewal) -> AttemptEvent | None:
    """What the renewal tells that is not recorded yet."""
    if renewal.outcome is not None:
        outcome = renewal.outcome
        if (outcome.attempt_id, outcome.epoch, outcome.node) != (
            renewal.attempt_id,
            renewal.epoch,
            renewal.node,
        ):
            raise StaleRenewal("the outcome is not about the attempt and node that report it")
        return NodeEnded(outcome)
    if renewal.started_at is not None and renewal.node not in attempt.started_nodes:
        return Started(renewal.node)
    return None
