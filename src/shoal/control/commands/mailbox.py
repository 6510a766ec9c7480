"""What node agents on other machines ask for before they can renew, and what they report."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import anyio.to_thread
import msgspec

from shoal.control.capabilities import Leadership, SubmissionInputs, Upkeep
from shoal.control.loops.launch import StartingAttempt, load_starting, submission_of
from shoal.control.services.state import ServiceState
from shoal.engines.base import Engine
from shoal.engines.remote.mailbox import Mailbox, SupportsMailbox
from shoal.errors import EngineUnreachable, NotFound, StateError
from shoal.model.attempt import AttemptState
from shoal.store import Store, Tx
from shoal.wire import (
    AGENT_REPLY_S,
    StatusReply,
    StatusReport,
    TaskAssignment,
    TaskCredentials,
    TaskSpec,
    TaskSpecRequest,
)

T = TypeVar("T")


async def assign_task(
    upkeep: Upkeep, inputs: SubmissionInputs, services: ServiceState, request: TaskSpecRequest
) -> TaskAssignment:
    """Return the task spec for the process that asks, if the task may begin now. The same process may ask
    again. `StateError`: another process asks, or the task's time is over. If the task ended while its spec
    was being assigned, it stays ended in the mailbox, and no process begins it.
    """
    engine, asked_at = _engine(upkeep.link.engine), upkeep.records.clock.monotonic()
    starting = await upkeep.records.store.read(lambda tx: _startable_attempt(tx, request))
    submission = submission_of(inputs, starting)
    waiting = engine.mailbox.find(request.attempt_id).get(request.node)
    # Before any process has the spec: a process that is refused now may never ask again, and no other could
    # get it.
    task_spec = await engine.resolve_task_spec(waiting.task_spec) if waiting is not None else None
    if upkeep.records.clock.monotonic() - asked_at >= AGENT_REPLY_S:
        raise EngineUnreachable(
            f"{request.node} does not wait any more for the task spec of {request.attempt_id}"
        )
    task = await _run_as_leader(
        upkeep.records.store, inputs.leadership, partial(engine.mailbox.assign, request)
    )
    # The task may have been submitted again meanwhile.
    if task_spec is None or waiting is None or task.task_spec != waiting.task_spec:
        task_spec = await engine.resolve_task_spec(task.task_spec)
    task_key = request.attempt_id, request.node, task.task_spec.identity.replacement
    with upkeep.running.leases.speaking(*task_key):
        # An end that was recorded since the question is about a task that no process had; none may get it
        # now.
        await upkeep.records.store.read(lambda tx: _refuse_ended(tx, task.task_spec))
        if upkeep.running.leases.is_overdue(*task_key):
            await upkeep.records.store.write(lambda tx: _refuse_ended(tx, task.task_spec))
        upkeep.running.leases.note_alive(*task_key)
    lease = msgspec.structs.replace(task_spec.lease, control_urls=inputs.leadership.announced_urls)
    return TaskAssignment(
        task_spec=msgspec.structs.replace(task_spec, lease=lease),
        credentials=_with_sidecar(services, task.task_spec, submission.credentials[request.node]),
        has_archive=task.task_spec.program.archive_digest is not None,
    )


def _with_sidecar(
    services: ServiceState, task_spec: TaskSpec, credentials: TaskCredentials
) -> TaskCredentials:
    """Add the identity of the sidecar for the node on which the server of a replica listens."""
    has_replica = task_spec.program.probe is not None and task_spec.ranks.node_rank == 0
    if services.sidecar_identities is None or not has_replica:
        return credentials
    return msgspec.structs.replace(
        credentials, sidecar=services.sidecar_identities.for_sidecar(task_spec.identity.attempt_id)
    )


async def archive_for(store: Store, engine: Engine, leadership: Leadership, request: TaskSpecRequest) -> str:
    """Return the path of the snapshot that belongs to this task, only for the process that has
    the task spec.
    """
    task = _mailbox(engine).find(request.attempt_id).get(request.node)
    if task is None or task.assignment is None or task.assignment.process != request.process:
        await _check_still_leading(store, leadership)
        raise StateError("the snapshot is for the process that has the task spec")
    return task.files.archive


async def receive_report(
    store: Store, engine: Engine, leadership: Leadership, report: StatusReport, log_chunk: bytes
) -> StatusReply:
    """Store what the node agent of a task reports. The loops look at once if a task began or ended."""
    reply = await _run_as_leader(store, leadership, partial(_mailbox(engine).receive, report, log_chunk))
    return msgspec.structs.replace(reply, control_urls=leadership.announced_urls)


async def _run_as_leader(store: Store, leadership: Leadership, work: Callable[[], T]) -> T:
    """Return the mailbox's reply if this control plane may give it. A node agent stops healthy ranks on a
    refusal, and a deposed control plane may refuse because of what it does not know.
    """
    try:
        return await anyio.to_thread.run_sync(work)
    finally:
        await _check_still_leading(store, leadership)


async def _check_still_leading(store: Store, leadership: Leadership) -> None:
    """Raise `Deposed` unless this control plane still leads. The report is on disk then, and the agent, which
    got no reply, repeats it to the successor.
    """
    if leadership.term:
        await store.read(lambda _: None)


def _mailbox(engine: Engine) -> Mailbox:
    return _engine(engine).mailbox


def _engine(engine: Engine) -> SupportsMailbox:
    if not isinstance(engine, SupportsMailbox):
        raise NotFound(
            f"no task spec waits here: the engine is `{engine.name}`, whose nodes are this machine"
        )
    return engine


def _refuse_ended(tx: Tx, task_spec: TaskSpec) -> None:
    """Raise if the task has ended or was replaced. A task that is to end is still assigned: its process
    learns of the stop and reports the end.
    """
    identity = task_spec.identity
    attempt = tx.attempts.get(identity.attempt_id)
    if attempt is None or attempt.state is AttemptState.ENDED or identity.node not in attempt.nodes_left:
        raise StateError(f"{identity.attempt_id} does not begin on {identity.node}: it has ended")
    if attempt.replacement_on(identity.node) != identity.replacement:
        raise StateError(f"the task of {identity.attempt_id} on {identity.node} was replaced")


def _startable_attempt(tx: Tx, request: TaskSpecRequest) -> StartingAttempt:
    """Return the attempt if the control plane still wants this task of it to begin."""
    starting = load_starting(tx, [request.attempt_id])
    attempt = starting[0].attempt if starting else None
    if attempt is None or request.node not in attempt.nodes_left:
        raise StateError(f"{request.attempt_id} does not begin on {request.node}: it has ended, or is to end")
    replacement = attempt.replacement_on(request.node)
    if request.previous_replacement is not None and replacement <= request.previous_replacement:
        raise NotFound(
            f"no task follows replacement {request.previous_replacement} of {request.attempt_id} "
            f"on {request.node} so far"
        )
    if request.previous_replacement is None and replacement != request.replacement:
        raise StateError(
            f"the task of {request.attempt_id} on {request.node} is replacement {replacement}, "
            f"not {request.replacement}"
        )
    return starting[0]
