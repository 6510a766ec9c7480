"""What the loss of one share means for its attempt: another share in its place, or the end of all of it.

The ranks of the other nodes stay or are started anew where they are, in the next group. Nothing is begun in
a lost share's place without the evidence, or the fence, that would allow another attempt.
"""

from __future__ import annotations

import msgspec

from shoal.control.core import Core, Lost
from shoal.control.decision import record_replacement
from shoal.control.nodes import is_still_dead
from shoal.control.orders import max_restarts
from shoal.control.queue import Changes, have_projects_changed
from shoal.model.attempt import Attempt, AttemptState, EndReason, NodeShare
from shoal.model.job import Job
from shoal.model.moves import REASON_OF_KIND, AttemptEvent, NodeEnded, Regrouped
from shoal.model.retry import MAX_LOSSES
from shoal.scheduler import replacement
from shoal.store import Tx
from shoal.wire import MAX_OUTCOME_MESSAGE, NodeOutcome

LOSSES = frozenset({EndReason.LOST, EndReason.FENCED})
LIVED_S, MAX_QUICK = 5.0, 2
"""So many shares in a row may be lost on a node before they lived that long: more would not help."""


def record_end(
    core: Core,
    tx: Tx,
    attempt_id: str,
    outcome: NodeOutcome,
    *,
    is_found_again: bool = False,
    fence_s: float | None = None,
    is_declared: bool = False,
) -> Attempt | None:
    """A share is over: begin another in its place if it was lost and that can be, else its attempt ends.

    Returns the attempt after it. Whoever calls this sees to it that `launch` is called for an attempt that
    has nodes to start; after a crash the watch does. Where only another node could take the share nothing is
    recorded yet if the caller finds the same end again at its next look: that is for the next plan.
    `fence_s`, `is_declared`: see `Lost`; that it is still so, the caller has asked in this transaction.
    """
    before = tx.attempts.get(attempt_id)
    event: AttemptEvent = NodeEnded(outcome)
    if before is not None and _is_present(before, outcome):
        job = tx.jobs.get(before.job_id)
        if job is not None and can_replace(core, job, before, outcome):
            share = _in_place(tx, job, before, outcome)
            if share is None and is_found_again:
                core.lost[attempt_id] = Lost(outcome, fence_s, is_declared)
                return before
            event = event if share is None else Regrouped(before.generation, outcome, share)
    return core.recorder.advance(tx, attempt_id, event)


def can_replace(core: Core, job: Job, attempt: Attempt, outcome: NodeOutcome) -> bool:
    """Whether the rest of the attempt waits for another share in place of this one."""
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
        and _num_quick(attempt, outcome.node, core.clock.now()) <= MAX_QUICK
    )


def _num_quick(attempt: Attempt, node: str, now: float) -> int:
    """How many shares in a row were lost there soon after they were begun, with one that is lost now."""
    count, began_at = 0, attempt.placed_at or now
    for one in attempt.replacements:
        if one.lost.node == node:
            count = count + 1 if one.at - began_at < LIVED_S else 0
        if one.node == node:
            began_at = one.at
    return count + 1 if now - began_at < LIVED_S else 0


def _is_present(attempt: Attempt, outcome: NodeOutcome) -> bool:
    """Whether it is about a share that the attempt has now: late and repeated ends are normal."""
    return (
        outcome.epoch == attempt.epoch
        and outcome.node in attempt.nodes_left
        and outcome.incarnation == attempt.incarnation(outcome.node)
    )


def _in_place(tx: Tx, job: Job, attempt: Attempt, outcome: NodeOutcome) -> NodeShare | None:
    """The same share of the same node, where that takes work."""
    node = tx.nodes.get(outcome.node)
    if node is None or not node.takes_work or outcome.node in job.excluded_nodes:
        return None
    return next(share for share in attempt.allocation if share.node == outcome.node)


async def replace_elsewhere(core: Core, changes: Changes, now: float) -> tuple[str, ...]:
    """Plan for one lost share whose node takes no work, and record it. Which attempt is to be handed over.

    The planner must stand as of `changes`: the decision is recorded with that, and can be made again.
    """
    attempt_id, (outcome, fence_s, is_declared) = core.lost.popitem()
    snapshot = core.planner.snapshot()
    share = replacement(snapshot, core.planner.policy, attempt_id, outcome.node, now)
    held = next((one.allocation for one in snapshot.holdings if one.attempt_id == attempt_id), ())

    def record(tx: Tx) -> tuple[str, ...]:
        before = tx.attempts.get(attempt_id)
        job = tx.jobs.get(before.job_id) if before is not None else None
        if before is None or job is None or not _is_present(before, outcome) or before.allocation != held:
            return ()
        if not can_replace(core, job, before, outcome) or not _is_still_so(tx, changes, share):
            return ()  # the next look finds the same loss, and other facts
        if fence_s is not None and not core.leases.is_still_fenced(before, outcome.node, fence_s):
            return ()  # somebody there has spoken since
        if is_declared and not is_still_dead(core, tx, outcome.node):
            return ()  # or the operator has taken his word back
        record_replacement(core, tx, attempt_id, outcome.node, share, changes.seen, now)
        if share is None or not _can_reach_first(tx, before, outcome, share):
            told = f"{outcome.message}; no other node could take its place at once"
            lost = msgspec.structs.replace(outcome, message=told[:MAX_OUTCOME_MESSAGE])
            core.recorder.advance(tx, attempt_id, NodeEnded(lost))
            return ()
        core.recorder.advance(tx, attempt_id, Regrouped(before.generation, outcome, share), now=now)
        return (attempt_id,)

    moved = await core.store.write(record)
    if moved:
        core.leases.trouble(attempt_id, outcome.node, None)  # nothing of it is there any more
    core.meetings.tell(attempt_id)
    core.watcher.set()
    return moved


def _is_still_so(tx: Tx, changes: Changes, share: NodeShare | None) -> bool:
    """Whether what the plan gives away may still be given."""
    node = tx.nodes.get(share.node) if share is not None else None
    is_open = share is None or (node is not None and node.takes_work)
    return is_open and tx.windows.all() == changes.windows and not have_projects_changed(tx, changes.seen)


def _can_reach_first(tx: Tx, attempt: Attempt, lost: NodeOutcome, share: NodeShare) -> bool:
    """The other nodes were told the first one's address when they began, and are not told another."""
    if lost.node != attempt.node_names[0]:
        return True
    was, now = tx.nodes.get(lost.node), tx.nodes.get(share.node)
    return was is not None and now is not None and was.facts.address == now.facts.address
