"""Hand placed attempts to the engine. Safe to repeat: the engine starts an attempt at most once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import NamedTuple

import structlog

from shoal.control.core import NEWS_PATIENCE_S, RENEW_S, Core
from shoal.control.frozen import spec_of
from shoal.control.orders import orders_for
from shoal.control.replace import record_end
from shoal.engines.base import Submission
from shoal.errors import EngineRefused, EngineUnreachable, NodeGone, StoreUnavailable
from shoal.identity import SecretsUnreadable, job_token, open_secrets, proof_key, replica_secret, ticket
from shoal.model.attempt import Attempt, AttemptState
from shoal.model.job import Job
from shoal.model.moves import Accepted, AttemptEvent, NodeEnded, Refused
from shoal.model.node import Node
from shoal.store import Tx
from shoal.wire import Credentials, EndKind, LeftBehind, NodeOutcome

log = structlog.get_logger()
ALONE = nullcontext()
"""For who submits one after the other."""


class Starting(NamedTuple):
    """A placed attempt, marked in `core.submitting`, with all that its submission is made of."""

    job: Job
    attempt: Attempt
    nodes: dict[str, Node]
    uid: int
    sealed: bytes | None
    left_behind: LeftBehind | None = None


async def launch(core: Core, attempt_id: str) -> None:
    """Submit the attempt if it, or a share in place of a lost one, is still starting."""
    for starting in await take(core, [attempt_id]):
        await hand_over(core, starting)


async def take(core: Core, attempt_ids: Sequence[str]) -> list[Starting]:
    """Those that are still starting and that nobody else submits; each has to be handed over.

    They are marked in `core.submitting` before their states are read, all in one view: whoever sees an
    attempt unmarked and not listed by the engine knows that no submission of it can still be on its way.
    """
    ours = [attempt_id for attempt_id in attempt_ids if attempt_id not in core.submitting]
    core.submitting.update(ours)
    taken: list[Starting] = []
    try:
        taken = await core.store.read(lambda tx: load(tx, ours)) if ours else []
    except StoreUnavailable as error:
        for attempt_id in ours:
            _later(core, attempt_id, error)
    finally:
        core.submitting.difference_update(set(ours) - {one.attempt.attempt_id for one in taken})
    return taken


def load(tx: Tx, attempt_ids: list[str]) -> list[Starting]:
    """In few statements: each of them gives up the interpreter, and gets it back when others let go of it."""
    recorded = tx.attempts.with_jobs(attempt_ids)
    found = [(job, own) for job, own in recorded if _is_starting(own)]
    used = sorted({name for _, attempt in found for name in attempt.node_names})
    nodes = {node.name: node for node in map(tx.nodes.get, used) if node is not None}
    uids = {project.name: project.uid for project in tx.people.projects()}
    taken = []
    for job, attempt in found:
        own = {name: nodes[name] for name in attempt.node_names if name in nodes}
        sealed = tx.secrets.get(job.job_id) if spec_of(job).secrets else None
        behind = tx.left_behind.get(job.left_behind) if job.left_behind else None
        taken.append(Starting(job, attempt, own, uids[attempt.project], sealed, behind))
    return taken


def _is_starting(attempt: Attempt) -> bool:
    has_new_share = attempt.state is AttemptState.RUNNING and bool(attempt.nodes_to_start)
    return has_new_share or attempt.state is AttemptState.STARTING


async def hand_over(
    core: Core, starting: Starting, at_once: AbstractAsyncContextManager[object] = ALONE
) -> None:
    """Submit what was taken, inside `at_once`, and record what the engine says."""
    attempt_id = starting.attempt.attempt_id
    try:
        async with at_once:
            answer = await _submit(core, starting)

        def record(tx: Tx) -> None:
            if isinstance(answer, NodeEnded):
                record_end(core, tx, attempt_id, answer.outcome, is_found_again=True)
            else:
                core.recorder.advance(tx, attempt_id, answer)

        await core.store.write(record, patience_s=NEWS_PATIENCE_S)
        core.leases.trouble(attempt_id, "", None)
    except (EngineUnreachable, StoreUnavailable) as error:
        _later(core, attempt_id, error)
    finally:
        core.submitting.discard(attempt_id)


def _later(core: Core, attempt_id: str, error: EngineUnreachable | StoreUnavailable) -> None:
    core.leases.trouble(attempt_id, "", error.message)
    log.warning("launch.later", attempt=attempt_id, error=error.message)


async def _submit(core: Core, starting: Starting) -> AttemptEvent:
    """What the engine says."""
    try:
        submission = submission_of(core, starting)
        try:
            native_id = await core.engine.submit(submission)
        finally:
            # Also when it failed: it may have begun at any moment until now, and its lease with it.
            core.leases.sent(starting.attempt.attempt_id)
    except NodeGone as error:
        return NodeEnded(_gone(core, starting.attempt, str(error.facts["node"]), error.message))
    except EngineRefused as error:
        return _refused(core, starting.attempt, f"{core.engine.name} refused it: {error.message}")
    except SecretsUnreadable as error:
        return _refused(core, starting.attempt, error.message)
    return Accepted(native_id=native_id)


def _refused(core: Core, attempt: Attempt, message: str) -> AttemptEvent:
    """Of an attempt that runs, only the share in place of a lost one was refused: that one is lost, too."""
    if attempt.state is AttemptState.STARTING:
        return Refused(message=message)
    return NodeEnded(_gone(core, attempt, attempt.nodes_to_start[0], message))


def _gone(core: Core, attempt: Attempt, node: str, message: str) -> NodeOutcome:
    """Nothing was started there: the node left between the plan and now."""
    return NodeOutcome(
        attempt_id=attempt.attempt_id,
        epoch=attempt.epoch,
        node=node,
        kind=EndKind.LOST,
        ended_at=core.clock.now(),
        message=message,
        incarnation=attempt.incarnation(node),
    )


def submission_of(core: Core, starting: Starting) -> Submission:
    job, attempt, nodes, uid, sealed, behind = starting
    missing = [name for name in attempt.node_names if name not in nodes]
    if missing:
        raise NodeGone(f"node `{missing[0]}` is not part of the cluster any more", node=missing[0])
    orders = orders_for(
        job,
        attempt,
        nodes,
        uid=uid,
        home=core.settings.state_dir,
        mount_roots=core.settings.mount_roots,
        control_urls=core.control_urls,
        renew_s=RENEW_S,
        left_behind=behind,
        cache_max_bytes=core.settings.max_cache_bytes,
    )
    credentials = {
        order.node: Credentials(
            proof_key=proof_key(core.key, attempt.attempt_id, order.node),
            job_token=job_token(core.key, attempt.attempt_id),
            replica_secret=replica_secret(core.key, attempt.attempt_id) if job.replica else "",
            secrets=open_secrets(core.key, job.job_id, sealed) if sealed else {},
        )
        for order in orders
    }
    archive = core.archive_path(job.archive_digest) if job.archive_digest else None
    return Submission(
        attempt_id=attempt.attempt_id,
        epoch=attempt.epoch,
        orders=orders,
        credentials=credentials,
        archive_path=archive,
        ticket=ticket(core.key, attempt.attempt_id),
    )
