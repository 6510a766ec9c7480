"""Hand placed attempts to the engine. Safe to repeat, because the engine starts an attempt at most once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import NamedTuple

import structlog

from shoal.clock import Clock
from shoal.control.capabilities import SubmissionInputs, Upkeep
from shoal.control.job_specs import archive_path, spec_of, task_specs_for
from shoal.control.loops.replace import record_end
from shoal.control.memory.running import RunningAttempts
from shoal.control.record import REPORT_PATIENCE_S
from shoal.engines.base import Submission
from shoal.errors import EngineRefused, EngineUnreachable, NodeGone, StoreUnavailable
from shoal.identity import (
    SecretsUnreadable,
    bootstrap_token,
    job_token,
    open_secrets,
    proof_key,
    replica_secret,
)
from shoal.model.attempt import Attempt, AttemptState
from shoal.model.job import Job
from shoal.model.moves import AttemptEvent, SubmissionAccepted, SubmissionRefused, TaskEnded
from shoal.model.node import Node
from shoal.store import Store, Tx
from shoal.wire import EndKind, LeftBehind, TaskCredentials, TaskOutcome

log = structlog.get_logger()
RENEW_S = 5.0
"""Interval at which a supervisor renews its lease."""
UNLIMITED = nullcontext()
"""For a caller that submits one attempt after the other."""


class StartingAttempt(NamedTuple):
    """A placed attempt that is marked as being submitted, with everything that its submission is made of."""

    job: Job
    attempt: Attempt
    nodes: dict[str, Node]
    uid: int
    sealed: bytes | None
    left_behind: LeftBehind | None = None


async def launch(upkeep: Upkeep, inputs: SubmissionInputs, attempt_id: str) -> None:
    """Submit the attempt if it, or a task in place of a lost one, is still starting."""
    for starting in await begin_submission_of(upkeep.records.store, upkeep.running, [attempt_id]):
        await submit_starting(upkeep, inputs, starting)


async def begin_submission_of(
    store: Store, running: RunningAttempts, attempt_ids: Sequence[str]
) -> list[StartingAttempt]:
    """Mark and return the attempts that are still starting and that no other caller submits. The caller has
    to submit each.

    They are marked in `submitting` before their states are read, all in one view. So a loop that sees an
    attempt unmarked and not listed by the engine knows that no submission of it is under way.
    """
    claimed = [attempt_id for attempt_id in attempt_ids if attempt_id not in running.submitting]
    running.submitting.update(claimed)
    taken: list[StartingAttempt] = []
    try:
        taken = await store.read(lambda tx: load_starting(tx, claimed)) if claimed else []
    except StoreUnavailable as error:
        for attempt_id in claimed:
            _note_retry(running, attempt_id, error)
    finally:
        running.submitting.difference_update(
            set(claimed) - {starting.attempt.attempt_id for starting in taken}
        )
    return taken


def load_starting(tx: Tx, attempt_ids: list[str]) -> list[StartingAttempt]:
    """Load in few statements, because each gives up the interpreter and gets it back only when other threads
    let go of it.
    """
    recorded = tx.attempts.with_jobs(attempt_ids)
    starting = [(job, attempt) for job, attempt in recorded if _is_starting(attempt)]
    used = sorted({name for _, attempt in starting for name in attempt.node_names})
    nodes = {node.name: node for node in map(tx.nodes.get, used) if node is not None}
    uids = {project.name: project.uid for project in tx.people.projects()}
    taken = []
    for job, attempt in starting:
        attempt_nodes = {name: nodes[name] for name in attempt.node_names if name in nodes}
        sealed = tx.secrets.get(job.job_id) if spec_of(job).secrets else None
        behind = tx.left_behind.get(job.left_behind) if job.left_behind else None
        taken.append(StartingAttempt(job, attempt, attempt_nodes, uids[attempt.project], sealed, behind))
    return taken


def _is_starting(attempt: Attempt) -> bool:
    has_new_task = attempt.state is AttemptState.RUNNING and bool(attempt.nodes_to_start)
    return has_new_task or attempt.state is AttemptState.STARTING


async def submit_starting(
    upkeep: Upkeep,
    inputs: SubmissionInputs,
    starting: StartingAttempt,
    at_once: AbstractAsyncContextManager[object] = UNLIMITED,
) -> None:
    """Submit the attempt inside `at_once`, and record what the engine answers."""
    attempt_id = starting.attempt.attempt_id
    try:
        async with at_once:
            answer = await _submit(upkeep, inputs, starting)

        def record(tx: Tx) -> None:
            if isinstance(answer, TaskEnded):
                record_end(
                    upkeep.records,
                    upkeep.running,
                    upkeep.link.engine,
                    tx,
                    attempt_id,
                    answer.outcome,
                    is_found_again=True,
                )
            else:
                upkeep.records.recorder.advance(tx, attempt_id, answer)

        await upkeep.records.store.write(record, patience_s=REPORT_PATIENCE_S)
        upkeep.running.leases.note_trouble(attempt_id, "", None)
    except (EngineUnreachable, StoreUnavailable) as error:
        _note_retry(upkeep.running, attempt_id, error)
    finally:
        upkeep.running.submitting.discard(attempt_id)


def _note_retry(
    running: RunningAttempts, attempt_id: str, error: EngineUnreachable | StoreUnavailable
) -> None:
    running.leases.note_trouble(attempt_id, "", error.message)
    log.warning("launch.later", attempt=attempt_id, error=error.message)


async def _submit(upkeep: Upkeep, inputs: SubmissionInputs, starting: StartingAttempt) -> AttemptEvent:
    """Hand the attempt to the engine. Return its answer as an event."""
    try:
        submission = submission_of(inputs, starting)
        try:
            native_id = await upkeep.link.engine.submit(submission)
        finally:
            # Also after a failure: the attempt may have begun at any moment until now, and its lease with it.
            upkeep.running.leases.note_submission(starting.attempt.attempt_id)
    except NodeGone as error:
        return TaskEnded(
            _lost_outcome(upkeep.records.clock, starting.attempt, str(error.facts["node"]), error.message)
        )
    except EngineRefused as error:
        return _refused(
            upkeep.records.clock, starting.attempt, f"{upkeep.link.engine.name} refused it: {error.message}"
        )
    except SecretsUnreadable as error:
        return _refused(upkeep.records.clock, starting.attempt, error.message)
    return SubmissionAccepted(native_id=native_id)


def _refused(clock: Clock, attempt: Attempt, message: str) -> AttemptEvent:
    """Return the event for a refusal. If the attempt runs, the engine refused only the task in place of a
    lost one, so that task is lost too.
    """
    if attempt.state is AttemptState.STARTING:
        return SubmissionRefused(message=message)
    return TaskEnded(_lost_outcome(clock, attempt, attempt.nodes_to_start[0], message))


def _lost_outcome(clock: Clock, attempt: Attempt, node: str, message: str) -> TaskOutcome:
    """Return the outcome of a task that was not started, because the node left between the plan and now."""
    return TaskOutcome(
        attempt_id=attempt.attempt_id,
        epoch=attempt.epoch,
        node=node,
        kind=EndKind.LOST,
        ended_at=clock.now(),
        message=message,
        replacement=attempt.replacement_on(node),
    )


def submission_of(inputs: SubmissionInputs, starting: StartingAttempt) -> Submission:
    job, attempt, nodes, uid, sealed, behind = starting
    missing = [name for name in attempt.node_names if name not in nodes]
    if missing:
        raise NodeGone(f"node `{missing[0]}` is not part of the cluster any more", node=missing[0])
    task_specs = task_specs_for(
        job,
        attempt,
        nodes,
        uid=uid,
        home=inputs.settings.state_dir,
        mount_roots=inputs.settings.mount_roots,
        control_urls=inputs.leadership.control_urls,
        renew_s=RENEW_S,
        left_behind=behind,
        cache_max_bytes=inputs.settings.max_cache_bytes,
    )
    credentials = {
        task_spec.identity.node: TaskCredentials(
            proof_key=proof_key(inputs.sealing.key, attempt.attempt_id, task_spec.identity.node),
            job_token=job_token(inputs.sealing.key, attempt.attempt_id),
            replica_secret=replica_secret(inputs.sealing.key, attempt.attempt_id) if job.replica else "",
            secrets=open_secrets(inputs.sealing.key, job.job_id, sealed) if sealed else {},
        )
        for task_spec in task_specs
    }
    archive = archive_path(inputs.settings, job.archive_digest) if job.archive_digest else None
    return Submission(
        attempt_id=attempt.attempt_id,
        epoch=attempt.epoch,
        task_specs=task_specs,
        credentials=credentials,
        archive_path=archive,
        bootstrap_token=bootstrap_token(inputs.sealing.key, attempt.attempt_id),
    )
