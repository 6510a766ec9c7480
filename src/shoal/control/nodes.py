"""What operators do with nodes."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shoal.control.actor import Actor
from shoal.control.core import Core
from shoal.control.leases import QUIET_S
from shoal.control.once import fingerprint, once
from shoal.control.record import note
from shoal.errors import NotFound, StateError
from shoal.model.attempt import Attempt
from shoal.model.job import Job
from shoal.model.node import Node, NodeState
from shoal.spec.wording import or_nearest
from shoal.store import Tx


async def set_node_state(
    core: Core, actor: Actor, name: str, state: NodeState, because: str, key: str | None
) -> Node:
    """Cordon, drain, resume or declare dead. What follows from it, `heal` does."""

    def change(tx: Tx) -> Node:
        now = core.clock.now()
        said = fingerprint("node", name, state, because)
        once(tx, actor, key, said, now, bool, lambda: _set(core, tx, actor, name, state, because))
        return find_node(tx, name)

    return await core.store.write(change)


def _set(core: Core, tx: Tx, actor: Actor, name: str, state: NodeState, because: str) -> bool:
    node, now = find_node(tx, name), core.clock.now()
    if state is NodeState.DEAD:
        _refuse_living(core, tx, node)
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
    return True


def _refuse_living(core: Core, tx: Tx, node: Node) -> None:
    """What an engine said before it could not be asked contradicts nobody; who speaks there does."""
    name = node.name
    if answers(core, node):
        raise StateError(
            f"node `{name}` answers: what runs there can be stopped, so it is not dead",
            hint=f"shoal drain {name}",
        )
    if core.outages.present is not None and (heard := speaking_on(core, tx.attempts.holding(), name)):
        raise StateError(
            f"node `{name}` may be alive: {', '.join(heard[:5])} there has not been silent for"
            f" {QUIET_S:.0f} s",
            hint=f"`shoal why {heard[0]}` says when it is; then `shoal nodes declare-dead {name}`",
        )


def answers(core: Core, node: Node) -> bool:
    """As its engine said at the last look, which was not in vain."""
    return node.facts.is_alive and core.outages.present is None


def speaking_on(core: Core, holding: Iterable[tuple[Job, Attempt]], name: str) -> list[str]:
    """The jobs whose supervisors on that node were heard from lately, whatever its engine says."""
    return [
        job.reference
        for job, attempt in holding
        if name in attempt.nodes_left and core.leases.speaks(attempt, name)
    ]


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
    held = [job.reference for job, attempt in tx.attempts.holding() if name in attempt.node_names]
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
