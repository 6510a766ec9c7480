"""What the loss of one share means for its attempt: another share in its place, or the end of all of it.

The ranks of the other nodes stay or are started anew where they are, in the next group. Nothing is begun in
a lost share's place without the evidence, or the fence, that would allow another attempt.
"""

from __future__ import annotations

from shoal.control.core import Core
from shoal.control.orders import max_restarts
from shoal.model.attempt import Attempt, AttemptState, EndReason, NodeShare
from shoal.model.job import Job
from shoal.model.moves import REASON_OF_KIND, AttemptEvent, NodeEnded, Regrouped
from shoal.model.retry import MAX_LOSSES
from shoal.store import Tx
from shoal.wire import NodeOutcome

LOSSES = frozenset({EndReason.LOST, EndReason.FENCED})
QUICK_S, MAX_QUICK = 10.0, 2
"""So many shares of one node may be lost so soon after each other: more need other nodes, or a pause."""


def record_end(core: Core, tx: Tx, attempt_id: str, outcome: NodeOutcome) -> Attempt | None:
    """A share is over: begin another in its place if it was lost and that can be, else its attempt ends.

    Returns the attempt after it. Whoever calls this sees to it that `launch` is called for an attempt that
    has nodes to start; after a crash the watch does.
    """
    before = tx.attempts.get(attempt_id)
    event: AttemptEvent = NodeEnded(outcome)
    if before is not None and _is_present(before, outcome):
        share = _in_place(core, tx, before, outcome)
        event = event if share is None else Regrouped(before.generation, outcome, share)
    return core.recorder.advance(tx, attempt_id, event)


def can_replace(core: Core, job: Job, attempt: Attempt, outcome: NodeOutcome) -> bool:
    """Whether the rest of the attempt waits for another share in place of this one."""
    lost_lately = [
        one
        for one in attempt.replacements
        if one.lost.node == outcome.node and core.clock.now() - one.at < QUICK_S
    ]
    return (
        core.engine.can_replace_shares
        and attempt.state is AttemptState.RUNNING
        and len(attempt.allocation) > 1
        and not attempt.outcomes
        and REASON_OF_KIND[outcome.kind] in LOSSES
        and not outcome.rules_hit
        and max_restarts(job) > 0
        and job.stop_asked_by is None
        and job.losses + len(attempt.replacements) < MAX_LOSSES
        and len(lost_lately) < MAX_QUICK
    )


def _is_present(attempt: Attempt, outcome: NodeOutcome) -> bool:
    """Whether it is about a share that the attempt has now: late and repeated ends are normal."""
    return (
        outcome.epoch == attempt.epoch
        and outcome.node in attempt.nodes_left
        and outcome.incarnation == attempt.incarnation(outcome.node)
    )


def _in_place(core: Core, tx: Tx, attempt: Attempt, outcome: NodeOutcome) -> NodeShare | None:
    """The same share of the same node, where that takes work."""
    job, node = tx.jobs.get(attempt.job_id), tx.nodes.get(outcome.node)
    if job is None or node is None or not node.takes_work or outcome.node in job.excluded_nodes:
        return None
    if not can_replace(core, job, attempt, outcome):
        return None
    return next(share for share in attempt.allocation if share.node == outcome.node)
