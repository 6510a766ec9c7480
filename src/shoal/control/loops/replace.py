"""Decide what the loss of one task means for its attempt: another task in its place, or the end of the
attempt.

The ranks of the other nodes stay, or start again where they are in the next rank group. A task in place of a
lost one needs the same evidence, or the same fence, that another attempt would need.
"""

from __future__ import annotations

import msgspec

from shoal.clock import Clock
from shoal.control.capabilities import Records, Upkeep
from shoal.control.commands.nodes import is_still_dead
from shoal.control.job_specs import max_restarts, spec_of
from shoal.control.loops.decision import record_replacement
from shoal.control.memory.queue import StoreChanges, have_projects_changed
from shoal.control.memory.running import LostTask, RunningAttempts
from shoal.engines.base import Engine
from shoal.errors import Bug
from shoal.model.attempt import Attempt, AttemptState, EndReason, NodeTask
from shoal.model.evidence import End, Evidence
from shoal.model.job import Job
from shoal.model.moves import REASON_OF_KIND, AttemptEvent, RanksRestarted, TaskEnded
from shoal.model.retry import MAX_LOSSES
from shoal.scheduler import Planner, replacement
from shoal.store import Tx
from shoal.wire import MAX_OUTCOME_MESSAGE, TaskOutcome

LOSSES = frozenset({EndReason.LOST, EndReason.FENCED})
LIVED_S, MAX_QUICK = 5.0, 2
"""The limit on tasks that are lost in a row on one node, each before it lived `LIVED_S`. More
would not help.
"""


def record_end(
    records: Records,
    running: RunningAttempts,
    engine: Engine,
    tx: Tx,
    attempt_id: str,
    outcome: TaskOutcome,
    *,
    is_found_again: bool = False,
    evidence: Evidence = Evidence.ENDED,
) -> Attempt | None:
    """Record the end of a task. If it was lost and can be replaced, start another in its place; otherwise the
    attempt ends.

    Return the attempt after that. The caller calls `launch` for an attempt that has nodes to start; after a
    crash `watch` does. If only another node could take the task and the caller will find the same end again
    at its next look, nothing is recorded here, and the next plan decides. The caller has checked in this
    transaction that the `evidence` still holds.
    """
    if evidence.rule.end is End.NO:
        raise Bug(f"attempt {attempt_id}: {evidence} is no evidence of an end")
    before = tx.attempts.get(attempt_id)
    event: AttemptEvent = TaskEnded(outcome)
    if before is not None and _is_present(before, outcome):
        job = tx.jobs.get(before.job_id)
        if job is not None and can_replace(records.clock, engine, job, before, outcome):
            task = _task_in_place(tx, job, before, outcome)
            if task is None and is_found_again:
                running.lost_tasks[attempt_id] = LostTask(outcome, evidence)
                return before
            event = event if task is None else RanksRestarted(before.rendezvous_round, outcome, task)
    return records.recorder.advance(tx, attempt_id, event)


def can_replace(clock: Clock, engine: Engine, job: Job, attempt: Attempt, outcome: TaskOutcome) -> bool:
    """Whether the rest of the attempt waits for another task in place of this one."""
    return (
        engine.can_replace_tasks
        and attempt.state is AttemptState.RUNNING
        and len(attempt.allocation) > 1
        and not attempt.outcomes
        and REASON_OF_KIND[outcome.kind] in LOSSES
        and not outcome.rules_hit
        and max_restarts(job) > 0
        and job.stop_asked_by is None
        and job.losses + len(attempt.replacements) < MAX_LOSSES
        and _num_quick(attempt, outcome.node, clock.now()) <= MAX_QUICK
    )


def _num_quick(attempt: Attempt, node: str, now: float) -> int:
    """Return how many tasks in a row were lost on the node soon after they began, including one that is lost
    now.
    """
    count, began_at = 0, attempt.placed_at or now
    for replaced in attempt.replacements:
        if replaced.lost.node == node:
            count = count + 1 if replaced.at - began_at < LIVED_S else 0
        if replaced.node == node:
            began_at = replaced.at
    return count + 1 if now - began_at < LIVED_S else 0


def _is_present(attempt: Attempt, outcome: TaskOutcome) -> bool:
    """Whether the outcome is about a task that the attempt has now. Late and repeated ends are normal."""
    return (
        outcome.epoch == attempt.epoch
        and outcome.node in attempt.nodes_left
        and outcome.replacement == attempt.replacement_on(outcome.node)
    )


def _task_in_place(tx: Tx, job: Job, attempt: Attempt, outcome: TaskOutcome) -> NodeTask | None:
    """Return the same task on the same node, if the node takes work."""
    node = tx.nodes.get(outcome.node)
    if node is None or not node.takes_work or outcome.node in job.excluded_nodes:
        return None
    return next(task for task in attempt.allocation if task.node == outcome.node)


async def replace_elsewhere(
    upkeep: Upkeep, planner: Planner, changes: StoreChanges, now: float
) -> tuple[str, ...]:
    """Plan for one lost task whose node takes no work, and record the plan. Return the attempt to hand over.

    The planner must stand as of `changes`, because the decision is recorded with them and can be made again.
    """
    attempt_id, (outcome, evidence) = upkeep.running.lost_tasks.popitem()
    snapshot = planner.snapshot()
    task = replacement(snapshot, planner.policy, attempt_id, outcome.node, now)
    held = next((holding.allocation for holding in snapshot.holdings if holding.attempt_id == attempt_id), ())

    def record(tx: Tx) -> tuple[str, ...]:
        before = tx.attempts.get(attempt_id)
        job = tx.jobs.get(before.job_id) if before is not None else None
        if before is None or job is None or not _is_present(before, outcome) or before.allocation != held:
            return ()
        if not can_replace(
            upkeep.records.clock, upkeep.link.engine, job, before, outcome
        ) or not _is_still_valid(tx, changes, task):
            return ()  # the next look finds the same loss, and other facts
        if not _still_holds(upkeep, tx, job, before, outcome.node, evidence):
            return ()
        record_replacement(planner, tx, attempt_id, outcome.node, task, changes.seen_seq, now)
        if task is None or not _can_reach_first(tx, before, outcome, task):
            message = f"{outcome.message}; no other node could take its place at once"
            lost = msgspec.structs.replace(outcome, message=message[:MAX_OUTCOME_MESSAGE])
            upkeep.records.recorder.advance(tx, attempt_id, TaskEnded(lost))
            return ()
        upkeep.records.recorder.advance(
            tx, attempt_id, RanksRestarted(before.rendezvous_round, outcome, task), now=now
        )
        return (attempt_id,)

    moved = await upkeep.records.store.write(record)
    if moved:
        upkeep.running.leases.note_trouble(attempt_id, outcome.node, None)  # nothing of it is there any more
    upkeep.running.rendezvous.notify(attempt_id)
    upkeep.signals.watch.set()
    return moved


def _still_holds(upkeep: Upkeep, tx: Tx, job: Job, attempt: Attempt, node: str, evidence: Evidence) -> bool:
    """Whether the evidence still allows to record the end of the node's task."""
    match evidence.rule.end:
        case End.NO:
            return False
        case End.YES:
            return True
        case End.WHILE_SILENT:
            return upkeep.running.leases.is_still_fenced(attempt, node, spec_of(job).fence)
        case End.WHILE_DECLARED:
            return is_still_dead(upkeep.running, upkeep.link.outages, tx, node)


def _is_still_valid(tx: Tx, changes: StoreChanges, task: NodeTask | None) -> bool:
    """Whether the resources that the plan gives away are still free to give."""
    node = tx.nodes.get(task.node) if task is not None else None
    is_open = task is None or (node is not None and node.takes_work)
    return is_open and tx.windows.all() == changes.windows and not have_projects_changed(tx, changes.seen_seq)


def _can_reach_first(tx: Tx, attempt: Attempt, lost: TaskOutcome, task: NodeTask) -> bool:
    """Whether the other nodes can reach a replaced first node. They learned its address when they began and
    do not learn another.
    """
    if lost.node != attempt.node_names[0]:
        return True
    was, now = tx.nodes.get(lost.node), tx.nodes.get(task.node)
    return was is not None and now is not None and was.facts.address == now.facts.address
