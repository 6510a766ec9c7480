"""Decide what the loss of one task means for its attempt: another task in its place, or the end of the
attempt. The planner chooses the node if the task cannot start again on its own.

The ranks of the other nodes stay, or start again where they are in the next rank group. A task in place of a
lost one needs the same evidence, or the same fence, that another attempt would need.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from shoal.clock import Clock
from shoal.control.capabilities import Records, Upkeep
from shoal.control.commands.nodes import is_still_dead
from shoal.control.job_specs import max_restarts, spec_of
from shoal.control.loops.decision import DecisionBasis
from shoal.control.memory.running import LostTask, RunningAttempts
from shoal.engines.base import Engine
from shoal.errors import Bug
from shoal.model.attempt import Attempt, AttemptState, EndReason, NodeTask
from shoal.model.evidence import End, Evidence
from shoal.model.job import Job
from shoal.model.moves import REASON_OF_KIND, AttemptEvent, RanksRestarted, TaskEnded
from shoal.model.retry import MAX_LOSSES
from shoal.scheduler import PlannedReplacement
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


def record_replacement(
    upkeep: Upkeep,
    tx: Tx,
    planned: PlannedReplacement,
    lost: LostTask,
    basis: DecisionBasis,
    why_not: str,
) -> bool:
    """Record what the plan decided for one lost task: another node takes it, or the attempt ends.

    Return whether another node takes it, so that the caller hands the attempt over. If the plan no longer
    holds, nothing is recorded: the next look finds the same loss, and other facts. `why_not`: why the plan
    found no node.
    """
    before = tx.attempts.get(planned.attempt_id)
    if before is None or not _is_still_lost(upkeep, tx, before, lost) or not basis.is_still_valid(tx):
        return False
    outcome, task = lost.outcome, planned.task
    if task is not None and not _can_take(tx, before, task):
        return False
    if task is not None and not _can_reach_first(tx, before, outcome, task):
        task, why_not = None, "it was the first node, and the others know only its address"
    if task is None:
        message = f"{outcome.message}; no other node could take its place at once: {why_not}"
        ended = msgspec.structs.replace(outcome, message=message[:MAX_OUTCOME_MESSAGE])
        upkeep.records.recorder.advance(tx, before.attempt_id, TaskEnded(ended))
        return False
    restarted = RanksRestarted(before.rendezvous_round, outcome, task)
    upkeep.records.recorder.advance(tx, before.attempt_id, restarted, now=basis.at)
    return True


def _is_still_lost(upkeep: Upkeep, tx: Tx, attempt: Attempt, lost: LostTask) -> bool:
    """Whether the evidence still holds and the rest of the attempt still waits for another task."""
    job = tx.jobs.get(attempt.job_id)
    return (
        job is not None
        and _is_present(attempt, lost.outcome)
        and can_replace(upkeep.records.clock, upkeep.link.engine, job, attempt, lost.outcome)
        and _still_holds(upkeep, tx, job, attempt, lost)
    )


def _still_holds(upkeep: Upkeep, tx: Tx, job: Job, attempt: Attempt, lost: LostTask) -> bool:
    """Whether the evidence still allows to record the end of the task."""
    node = lost.outcome.node
    match lost.evidence.rule.end:
        case End.NO:
            return False
        case End.YES:
            return True
        case End.WHILE_SILENT:
            return upkeep.running.leases.is_still_fenced(attempt, node, spec_of(job).fence)
        case End.WHILE_DECLARED:
            return is_still_dead(upkeep.running, upkeep.link.outages, tx, node)


def _can_take(tx: Tx, attempt: Attempt, task: NodeTask) -> bool:
    """Whether the node still takes work, and has no other task of the attempt."""
    node = tx.nodes.get(task.node)
    return node is not None and node.takes_work and task.node not in attempt.node_names


def note_replacements(
    upkeep: Upkeep, replacements: Sequence[PlannedReplacement], placed: Collection[str]
) -> None:
    """Tell the other nodes of each attempt what was decided. `placed`: attempts whose lost task continues on
    another node.
    """
    for planned in replacements:
        if planned.attempt_id in placed:
            # The lost node has nothing of the attempt any more.
            upkeep.running.leases.note_trouble(planned.attempt_id, planned.lost_node, None)
        upkeep.running.rendezvous.notify(planned.attempt_id)
    if replacements:
        upkeep.signals.watch.set()


def _can_reach_first(tx: Tx, attempt: Attempt, lost: TaskOutcome, task: NodeTask) -> bool:
    """Whether the other nodes can reach a replaced first node. They learned its address when they began and
    do not learn another.
    """
    if lost.node != attempt.node_names[0]:
        return True
    was, now = tx.nodes.get(lost.node), tx.nodes.get(task.node)
    return was is not None and now is not None and was.facts.address == now.facts.address
