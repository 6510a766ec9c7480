"""Hand placed attempts to the engine. Safe to repeat: the engine starts an attempt at most once."""

from __future__ import annotations

import structlog

from shoal.control.core import RENEW_S, Core
from shoal.control.orders import orders_for
from shoal.engines.base import Submission
from shoal.errors import EngineRefused, EngineUnreachable, NodeGone, StoreUnavailable
from shoal.identity import SecretsUnreadable, job_token, open_secrets, proof_key
from shoal.model.attempt import Attempt, AttemptState
from shoal.model.job import Job
from shoal.model.moves import Accepted, AttemptEvent, NodeEnded, Refused
from shoal.model.node import Node
from shoal.store import Tx
from shoal.wire import Credentials, EndKind, NodeOutcome

log = structlog.get_logger()


async def launch(core: Core, attempt_id: str) -> None:
    """Submit the attempt if it is still starting.

    `core.submitting` is marked before the state is read: whoever sees the attempt unmarked and not
    listed by the engine knows that no submission of it can still be on its way.
    """
    if attempt_id in core.submitting:
        return
    core.submitting.add(attempt_id)
    try:
        await _launch(core, attempt_id)
        core.leases.trouble(attempt_id, "", None)
    except (EngineUnreachable, StoreUnavailable) as error:
        core.leases.trouble(attempt_id, "", error.message)
        log.warning("launch.later", attempt=attempt_id, error=error.message)
    finally:
        core.submitting.discard(attempt_id)


async def _launch(core: Core, attempt_id: str) -> None:
    def load(tx: Tx) -> tuple[Job, Attempt, dict[str, Node], int, bytes | None] | None:
        attempt = tx.attempts.get(attempt_id)
        if attempt is None or attempt.state is not AttemptState.STARTING:
            return None
        job = tx.jobs.get(attempt.job_id)
        project = tx.people.get_project(attempt.project)
        assert job is not None
        assert project is not None
        nodes = {node.name: node for node in tx.nodes.all() if node.name in attempt.node_names}
        return job, attempt, nodes, project.uid, tx.secrets.get(job.job_id)

    loaded = await core.store.read(load)
    if loaded is None:
        return
    job, attempt, nodes, uid, sealed = loaded
    try:
        submission = _submission(core, job, attempt, nodes, uid, sealed)
        try:
            native_id = await core.engine.submit(submission)
        finally:
            # Also when it failed: it may have begun at any moment until now, and its lease with it.
            core.leases.sent(attempt_id)
    except NodeGone as error:
        answer: AttemptEvent = NodeEnded(_gone(core, attempt, str(error.facts["node"]), error.message))
    except EngineRefused as error:
        answer = Refused(message=f"{core.engine.name} refused it: {error.message}")
    except SecretsUnreadable as error:
        answer = Refused(message=error.message)
    else:
        answer = Accepted(native_id=native_id)
    await core.store.write(lambda tx: core.recorder.advance(tx, attempt_id, answer))


def _gone(core: Core, attempt: Attempt, node: str, message: str) -> NodeOutcome:
    """Nothing was started there: the node left between the plan and now."""
    return NodeOutcome(
        attempt_id=attempt.attempt_id,
        epoch=attempt.epoch,
        node=node,
        kind=EndKind.LOST,
        ended_at=core.clock.now(),
        message=message,
    )


def _submission(
    core: Core, job: Job, attempt: Attempt, nodes: dict[str, Node], uid: int, sealed: bytes | None
) -> Submission:
    missing = [name for name in attempt.node_names if name not in nodes]
    if missing:
        raise NodeGone(f"node `{missing[0]}` is not part of the cluster any more", node=missing[0])
    orders = orders_for(
        job,
        attempt,
        nodes,
        uid=uid,
        home=core.settings.home,
        mount_roots=core.settings.mount_roots,
        control_url=core.control_url,
        renew_s=RENEW_S,
    )
    credentials = {
        order.node: Credentials(
            proof_key=proof_key(core.key, attempt.attempt_id, order.node),
            job_token=job_token(core.key, attempt.attempt_id),
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
    )
