"""Keep the list of nodes current, and move work off nodes that are drained or declared dead."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial

import msgspec

from shoal.clock import Clock
from shoal.control.actor import SHOAL
from shoal.control.capabilities import EngineLink, Records, Upkeep
from shoal.control.commands.nodes import is_answering, is_still_dead
from shoal.control.loops.node_refresh import refresh_nodes
from shoal.control.loops.replace import record_end
from shoal.control.loops.watch import cancel
from shoal.control.memory.running import RunningAttempts
from shoal.control.record import AttemptRecorder, batched, record_event
from shoal.engines.base import Engine
from shoal.errors import EngineUnreachable
from shoal.model.attempt import Attempt, AttemptState, EndReason
from shoal.model.evidence import Evidence
from shoal.model.job import Job
from shoal.model.moves import StopRequested
from shoal.model.node import Node, NodeState
from shoal.store import Tx
from shoal.wire import EndKind, TaskOutcome

VACATED_STATES = (NodeState.DRAINING, NodeState.DEAD)
"""Work on a node in one of these states moves to other nodes."""
MAX_DRAINED = 100
"""Nodes that one transaction marks as drained."""
MOVE_SERVERS_S = 300.0
"""The longest time a drain waits for a service to start another replica elsewhere."""


async def heal(upkeep: Upkeep) -> None:
    """Look once at the nodes."""
    await refresh_nodes(upkeep.records, upkeep.link)
    nodes = {node.name: node for node in await upkeep.records.store.read(lambda tx: tx.nodes.all())}
    moving = {n for n, node in nodes.items() if node.state in VACATED_STATES}
    if not moving:
        return
    for job, attempt in await upkeep.records.store.read(lambda tx: tx.attempts.holding()):
        for name in sorted(moving.intersection(attempt.nodes_left)):
            await _move(upkeep, job, attempt, nodes[name])
    if any(nodes[name].state is NodeState.DRAINING for name in moving):
        for some in batched(await upkeep.records.store.read(_drained), MAX_DRAINED):
            await upkeep.records.store.write(partial(_finish_drains, upkeep.records.clock, some))


def _drained(tx: Tx) -> list[Node]:
    """Return draining nodes that hold nothing."""
    held = {name for _, attempt in tx.attempts.holding() for name in attempt.node_names}
    return [n for n in tx.nodes.all() if n.state is NodeState.DRAINING and n.name not in held]


def _finish_drains(clock: Clock, empty: Sequence[Node], tx: Tx) -> None:
    """Mark the nodes as drained. The planner places nothing on a draining node, so a node that held nothing
    still holds nothing while its record is the same.

    Reading again what holds resources would take 50 ms for each node if 20,000 jobs run.
    """
    now = clock.now()
    for node in empty:
        if tx.nodes.get(node.name) == node:
            drained = msgspec.structs.replace(
                node, state=NodeState.DRAINED, changed_at=now, version=node.version + 1
            )
            tx.nodes.put(drained)
            data = {"from": node.state, "to": drained.state, "because": node.because}
            record_event(tx, "node.drained", now, SHOAL, node=node.name, data=data)


async def _move(upkeep: Upkeep, job: Job, attempt: Attempt, node: Node) -> None:
    if node.state is NodeState.DEAD and not is_answering(upkeep.link.outages, node):
        await _reap(upkeep, attempt, node)
        return
    if attempt.state is AttemptState.STOPPING or _is_being_moved(upkeep.records.clock, job, attempt, node):
        return
    after = await upkeep.records.store.write(
        lambda tx: _stop(upkeep.records.recorder, tx, attempt.attempt_id, node.name)
    )
    if after is not None and after.state is AttemptState.STOPPING:
        await cancel(upkeep.link.engine, job, after)


def _stop(recorder: AttemptRecorder, tx: Tx, attempt_id: str, name: str) -> Attempt | None:
    """Ask the attempt to stop. Return None if the node was resumed since the look, or has no task of the
    attempt any more.
    """
    node, attempt = tx.nodes.get(name), tx.attempts.get(attempt_id)
    if node is None or node.state not in VACATED_STATES or attempt is None or name not in attempt.nodes_left:
        return None
    stop = StopRequested(reason=EndReason.PREEMPTED, by=f"the drain of {name}")
    return recorder.advance(tx, attempt_id, stop)


def _is_being_moved(clock: Clock, job: Job, attempt: Attempt, node: Node) -> bool:
    """Whether a service still moves its replica: it stops the old one once another is ready, or after
    `MOVE_SERVERS_S`.
    """
    is_server = job.replica is not None and attempt.state is AttemptState.RUNNING
    return is_server and clock.now() - node.changed_at < MOVE_SERVERS_S


async def _reap(upkeep: Upkeep, attempt: Attempt, node: Node) -> None:
    """Record that the attempt's task on a dead node ended. An operator's word is evidence about what ran
    there, not about what may still reach the node.

    The attempt is marked like a submission. While no submission is under way and the node is silent, no task
    of it can begin.
    """
    if attempt.attempt_id in upkeep.running.submitting:
        return
    upkeep.running.submitting.add(attempt.attempt_id)
    try:
        if not await _is_alive(upkeep.link.engine, node.name):
            await upkeep.records.store.write(
                lambda tx: _end(upkeep.records, upkeep.running, upkeep.link, tx, attempt, node.name)
            )
            upkeep.signals.plan.set()
    finally:
        upkeep.running.submitting.discard(attempt.attempt_id)


async def _is_alive(engine: Engine, name: str) -> bool:
    """Whether the engine sees the node alive now."""
    with contextlib.suppress(EngineUnreachable):
        return any(facts.is_alive and facts.name == name for facts in await engine.nodes())
    return False


def _end(
    records: Records, running: RunningAttempts, link: EngineLink, tx: Tx, attempt: Attempt, name: str
) -> None:
    """Check again in the transaction: a supervisor on the node may have spoken since the look and been told
    to go on, and an operator may have withdrawn the declaration.
    """
    node = tx.nodes.get(name)
    if node is not None and is_still_dead(running, link.outages, tx, name):
        gone = _declared_dead_outcome(records.clock, attempt, node)
        record_end(
            records,
            running,
            link.engine,
            tx,
            attempt.attempt_id,
            gone,
            is_found_again=True,
            evidence=Evidence.DECLARED_DEAD,
        )


def _declared_dead_outcome(clock: Clock, attempt: Attempt, node: Node) -> TaskOutcome:
    return TaskOutcome(
        attempt_id=attempt.attempt_id,
        epoch=attempt.epoch,
        node=node.name,
        kind=EndKind.LOST,
        ended_at=clock.now(),
        message=f"declared dead by {node.by}",
        replacement=attempt.replacement_on(node.name),
    )
