"""What operators do with nodes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from shoal.clock import Clock
from shoal.control.actor import Actor
from shoal.control.capabilities import Records, Upkeep
from shoal.control.memory.health import EngineOutages
from shoal.control.memory.leases import QUIET_S
from shoal.control.memory.running import RunningAttempts
from shoal.control.record import fingerprint, record_event, run_idempotent
from shoal.errors import NotFound, StateError
from shoal.model.attempt import Attempt, AttemptState
from shoal.model.job import Job
from shoal.model.node import Node, NodeState
from shoal.spec.error_text import or_nearest
from shoal.store import Tx

HoldingJobs = Iterable[tuple[Job, Attempt]]


class NodeStateChange(NamedTuple):
    node: Node
    restarted_job_ids: tuple[str, ...]
    """Ids of the jobs that lose their task on a node that was declared dead, and go on without it."""


async def set_node_state(
    upkeep: Upkeep, actor: Actor, name: str, state: NodeState, because: str, key: str | None
) -> NodeStateChange:
    """Cordon, drain, resume or declare dead. `heal` does what follows from it, at once."""

    def change(tx: Tx) -> NodeStateChange:
        now = upkeep.records.clock.now()
        # Not `node`: older versions remembered a bool under that word.
        digest = fingerprint("node.state", name, state, because)
        restarted, _ = run_idempotent(
            tx,
            actor,
            key,
            digest,
            now,
            tuple[str, ...],
            lambda: _set(upkeep, tx, actor, name, state, because),
        )
        return NodeStateChange(find_node(tx, name), restarted)

    changed = await upkeep.records.store.write(change)
    upkeep.signals.heal.set()
    return changed


def _set(upkeep: Upkeep, tx: Tx, actor: Actor, name: str, state: NodeState, because: str) -> tuple[str, ...]:
    node, now = find_node(tx, name), upkeep.records.clock.now()
    restarted: tuple[str, ...] = ()
    if state is NodeState.DEAD:
        holding = tx.attempts.holding_on(name)
        _refuse_living(upkeep.running, upkeep.link.outages, holding, node)
        restarted = tuple(job.job_id for job, attempt in holding if _restarts_elsewhere(job, attempt, name))
    changed = msgspec.structs.replace(
        node,
        state=state,
        because=because,
        by=actor.name,
        changed_at=now,
        version=node.version + 1,
    )
    tx.nodes.put(changed)
    data = {"from": node.state, "to": state, "because": because}
    record_event(tx, f"node.{state}", now, actor, node=name, data=data)
    return restarted


def _restarts_elsewhere(job: Job, attempt: Attempt, name: str) -> bool:
    """Whether the job goes on elsewhere once nothing of it runs on that node."""
    is_stopping = attempt.state is AttemptState.STOPPING or job.stop_asked_by is not None
    return name in attempt.nodes_left and not is_stopping


def _refuse_living(
    running: RunningAttempts, outages: EngineOutages, holding: HoldingJobs, node: Node
) -> None:
    """Refuse to declare a node dead that lives. An engine's last word from before its outage contradicts no
    operator. A supervisor that speaks does contradict, whatever the engine says: on a node that the engine
    calls drained or down, all ranks may be healthy.
    """
    name = node.name
    speaking = speaking_jobs(running, holding, name)
    if is_answering(outages, node):
        raise StateError(
            f"node `{name}` answers, as far as its cluster knows: what runs there can be stopped",
            hint=f"stop it with `shoal drain {name}`; if the node is off, its cluster has yet to notice:"
            " say it again in a minute",
        )
    if speaking:
        silent_s = min(speaking.values())
        raise StateError(
            f"node `{name}` may be alive: {', '.join(list(speaking)[:5])} there has been silent for"
            f" {silent_s:.0f} s, and is believed to be gone after {QUIET_S:.0f} s",
            hint=f"stop what runs there with `shoal drain {name}`; if it is off, say so in"
            f" {QUIET_S - silent_s + 1:.0f} s: `shoal nodes declare-dead {name}`",
        )


def is_answering(outages: EngineOutages, node: Node) -> bool:
    """Whether the engine listed the node as alive at the last look, and still answers."""
    return node.facts.is_alive and outages.current is None


def is_still_dead(running: RunningAttempts, outages: EngineOutages, tx: Tx, name: str) -> bool:
    """Whether an operator's declaration that nothing runs there still holds. Asked in the transaction that
    relies on it.
    """
    node = tx.nodes.get(name)
    if node is None or node.state is not NodeState.DEAD or is_answering(outages, node):
        return False
    return not speaking_jobs(running, tx.attempts.holding_on(name), name)


def speaking_jobs(running: RunningAttempts, holding: HoldingJobs, name: str) -> dict[str, float]:
    """Return the jobs whose supervisors on that node spoke within `QUIET_S`, and how long they have been
    silent since. A supervisor whose renewal is being answered counts as silent for 0 s.
    """
    return {
        job.reference: silent_s
        for job, attempt in holding
        if name in attempt.nodes_left
        and (silent_s := running.leases.supervisor_silence_s(attempt, name)) <= QUIET_S
    }


async def remove_node(
    records: Records, outages: EngineOutages, actor: Actor, name: str, key: str | None
) -> None:
    """Remove a node that is gone from the list. If it comes back, it is a new node."""

    def change(tx: Tx) -> None:
        now = records.clock.now()
        digest = fingerprint("node.remove", name)
        run_idempotent(
            tx, actor, key, digest, now, bool, lambda: _remove(records.clock, outages, tx, actor, name)
        )

    await records.store.write(change)


def _remove(clock: Clock, outages: EngineOutages, tx: Tx, actor: Actor, name: str) -> bool:
    node, now = find_node(tx, name), clock.now()
    if is_answering(outages, node):
        raise StateError(f"node {name} answers; only one that is gone can be removed", hint="shoal nodes")
    held = [job.reference for job, _ in tx.attempts.holding_on(name)]
    if held:
        raise StateError(
            f"node {name} still holds {', '.join(held[:5])}",
            hint=f"if nothing runs there any more, `shoal nodes declare-dead {name}` first",
        )
    tx.nodes.remove(name)
    record_event(tx, "node.removed", now, actor, node=name)
    return True


def find_node(tx: Tx, name: str) -> Node:
    """Return the node. Raise `NotFound` with the nearest name."""
    node = tx.nodes.get(name)
    if node is None:
        near = or_nearest(name, (node.name for node in tx.nodes.all()))
        raise NotFound(f"no node `{name}`{near}", hint="list them with `shoal nodes`")
    return node
