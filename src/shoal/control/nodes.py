"""What operators do with nodes."""

from __future__ import annotations

import msgspec

from shoal.control.actor import Actor
from shoal.control.core import Core
from shoal.control.once import fingerprint, once
from shoal.control.record import note
from shoal.errors import NotFound, StateError
from shoal.model.node import Node, NodeState
from shoal.spec.wording import nearest
from shoal.store import Tx


async def set_node_state(
    core: Core, actor: Actor, name: str, state: NodeState, because: str, key: str | None
) -> Node:
    """Cordon, drain, resume or declare dead. What follows from it, `heal` does."""

    def change(tx: Tx) -> Node:
        now = core.clock.now()
        said = fingerprint("node", name, state, because)
        once(tx, actor, key, said, now, bool, lambda: _set(tx, actor, name, state, because, now))
        return find_node(tx, name)

    return await core.store.write(change)


def _set(tx: Tx, actor: Actor, name: str, state: NodeState, because: str, now: float) -> bool:
    node = find_node(tx, name)
    if state is NodeState.DEAD and node.facts.is_alive:
        raise StateError(
            f"node `{name}` answers: what runs there can be stopped, so it is not dead",
            hint=f"shoal drain {name}",
        )
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


async def remove_node(core: Core, actor: Actor, name: str, key: str | None) -> None:
    """Take a node that is gone off the list. One that comes back is a new node."""

    def change(tx: Tx) -> None:
        now = core.clock.now()
        said = fingerprint("node.remove", name)
        once(tx, actor, key, said, now, bool, lambda: _remove(tx, actor, name, now))

    await core.store.write(change)


def _remove(tx: Tx, actor: Actor, name: str, now: float) -> bool:
    node = find_node(tx, name)
    if node.facts.is_alive:
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
        meant = nearest(name, (node.name for node in tx.nodes.all()))
        near = f"; did you mean `{meant}`?" if meant else ""
        raise NotFound(f"no node `{name}`{near}", hint="list them with `shoal nodes`")
    return node
