"""What operators do with nodes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from shoal.control.actor import Actor
from shoal.control.core import Core
from shoal.control.leases import QUIET_S
from shoal.control.once import fingerprint, once
from shoal.control.record import note
from shoal.errors import NotFound, StateError
from shoal.model.attempt import Attempt, AttemptState
from shoal.model.job import Job
from shoal.model.node import Node, NodeState
from shoal.spec.wording import or_nearest
from shoal.store import Tx

Holding = Iterable[tuple[Job, Attempt]]


class Decided(NamedTuple):
    node: Node
    begin_anew: tuple[str, ...]
    """By id: the jobs that lose what they had on a node that was declared dead, and go on without it."""


async def set_node_state(
    core: Core, actor: Actor, name: str, state: NodeState, because: str, key: str | None
) -> Decided:
    """Cordon, drain, resume or declare dead. What follows from it, `heal` does."""

    def change(tx: Tx) -> Decided:
        now = core.clock.now()
        # Not `node`: under that word older versions remembered a bool.
        said = fingerprint("node.state", name, state, because)
        begin_anew, _ = once(
            tx, actor, key, said, now, tuple[str, ...], lambda: _set(core, tx, actor, name, state, because)
        )
        return Decided(find_node(tx, name), begin_anew)

    return await core.store.write(change)


def _set(core: Core, tx: Tx, actor: Actor, name: str, state: NodeState, because: str) -> tuple[str, ...]:
    node, now = find_node(tx, name), core.clock.now()
    begin_anew: tuple[str, ...] = ()
    if state is NodeState.DEAD:
        holding = tx.attempts.holding_on(name)
        _refuse_living(core, holding, node)
        begin_anew = tuple(job.job_id for job, attempt in holding if _begins_anew(job, attempt, name))
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
    note(tx, f"node.{state}", now, actor, node=name, data=data)
    return begin_anew


def _begins_anew(job: Job, attempt: Attempt, name: str) -> bool:
    """Whether the job goes on elsewhere when nothing of it runs on that node any more."""
    is_stopping = attempt.state is AttemptState.STOPPING or job.stop_asked_by is not None
    return name in attempt.nodes_left and not is_stopping


def _refuse_living(core: Core, holding: Holding, node: Node) -> None:
    """What an engine said before it could not be asked contradicts nobody; who speaks there does, whatever an
    engine says: on a node that is drained or down there, all that runs may be well.
    """
    name = node.name
    heard = speaking_on(core, holding, name)
    if answers(core, node):
        raise StateError(
            f"node `{name}` answers, as far as its cluster knows: what runs there can be stopped",
            hint=f"stop it with `shoal drain {name}`; if the node is off, its cluster has yet to notice:"
            " say it again in a minute",
        )
    if heard:
        silent_s = min(heard.values())
        raise StateError(
            f"node `{name}` may be alive: {', '.join(list(heard)[:5])} there has been silent for"
            f" {silent_s:.0f} s, and is believed to be gone after {QUIET_S:.0f} s",
            hint=f"stop what runs there with `shoal drain {name}`; if it is off, say so in"
            f" {QUIET_S - silent_s + 1:.0f} s: `shoal nodes declare-dead {name}`",
        )


def answers(core: Core, node: Node) -> bool:
    """As its engine said at the last look, which was not in vain."""
    return node.facts.is_alive and core.outages.present is None


def is_still_dead(core: Core, tx: Tx, name: str) -> bool:
    """Whether an operator's word stands that nothing runs there: asked in the transaction that goes by it."""
    node = tx.nodes.get(name)
    if node is None or node.state is not NodeState.DEAD or answers(core, node):
        return False
    return not speaking_on(core, tx.attempts.holding_on(name), name)


def speaking_on(core: Core, holding: Holding, name: str) -> dict[str, float]:
    """The jobs whose supervisors on that node spoke lately, and for how long they have said nothing since.
    Who is just being answered has said something now.
    """
    return {
        job.reference: wordless_s
        for job, attempt in holding
        if name in attempt.nodes_left and (wordless_s := core.leases.wordless_s(attempt, name)) <= QUIET_S
    }


async def remove_node(core: Core, actor: Actor, name: str, key: str | None) -> None:
    """Take a node that is gone off the list. One that comes back is a new node."""

    def change(tx: Tx) -> None:
        now = core.clock.now()
        said = fingerprint("node.remove", name)
        once(tx, actor, key, said, now, bool, lambda: _remove(core, tx, actor, name))

    await core.store.write(change)


def _remove(core: Core, tx: Tx, actor: Actor, name: str) -> bool:
    node, now = find_node(tx, name), core.clock.now()
    if answers(core, node):
        raise StateError(f"node {name} answers; only one that is gone can be removed", hint="shoal nodes")
    held = [job.reference for job, _ in tx.attempts.holding_on(name)]
    if held:
        raise StateError(
            f"node {name} still holds {', '.join(held[:5])}",
            hint=f"if nothing runs there any more, `shoal nodes declare-dead {name}` first",
        )
    tx.nodes.remove(name)
    note(tx, "node.removed", now, actor, node=name)
    return True


def find_node(tx: Tx, name: str) -> Node:
    """`NotFound` with the nearest name there is."""
    node = tx.nodes.get(name)
    if node is None:
        near = or_nearest(name, (node.name for node in tx.nodes.all()))
        raise NotFound(f"no node `{name}`{near}", hint="list them with `shoal nodes`")
    return node
