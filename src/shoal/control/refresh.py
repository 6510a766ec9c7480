"""Keep the list of nodes true: what the engine has now, against what is recorded."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import structlog

from shoal.control.actor import SHOAL
from shoal.control.core import Core
from shoal.control.record import note
from shoal.errors import EngineUnreachable
from shoal.model.node import Node, NodeFacts
from shoal.store import Tx

log = structlog.get_logger()


async def refresh_nodes(core: Core) -> None:
    """Record what the engine says of its nodes now. Changes nothing where it cannot be asked.

    Nodes of an engine before are forgotten, unless this one has them, too, or something holds them: they
    would count as places for work that no node of this one could ever do.
    """
    try:
        facts = {f.name: f for f in await core.engine.nodes()}
    except EngineUnreachable as error:
        log.warning("engine.unreachable", engine=core.engine.name, error=error.message)
        return
    known = {node.name: node for node in await core.store.read(lambda tx: tx.nodes.all())}
    lost = {n: msgspec.structs.replace(node.facts, is_alive=False) for n, node in known.items()}
    wanted = {**lost, **facts}
    # A node is added when it answers: one that was removed while it is silent stays away until then.
    changed = {
        name: fact
        for name, fact in wanted.items()
        if (_is_news(core, known[name], fact, is_listed=name in facts) if name in known else fact.is_alive)
    }
    if changed:
        await core.store.write(lambda tx: _put(core, tx, changed, facts))
    if vanished := [n for n, node in known.items() if n not in facts and _is_given_up(core, node)]:
        await core.store.write(lambda tx: _drop(core, tx, vanished))


def _is_news(core: Core, known: Node, fact: NodeFacts, *, is_listed: bool) -> bool:
    return known.facts != fact or (is_listed and known.engine != core.engine.name)


def _is_given_up(core: Core, node: Node) -> bool:
    return node.facts.is_simulated or node.engine != core.engine.name


def _put(core: Core, tx: Tx, changed: dict[str, NodeFacts], listed: Collection[str]) -> None:
    now = core.clock.now()
    for name, facts in sorted(changed.items()):
        known = tx.nodes.get(name)
        if known is None and not facts.is_alive:
            continue
        if known is None:
            tx.nodes.put(Node(facts=facts, engine=core.engine.name, changed_at=now))
            note(tx, "node.added", now, SHOAL, node=name, data=msgspec.to_builtins(facts))
            continue
        engine = core.engine.name if name in listed else known.engine
        tx.nodes.put(msgspec.structs.replace(known, facts=facts, engine=engine, version=known.version + 1))
        if known.facts.is_alive != facts.is_alive:
            kind = "node.answers" if facts.is_alive else "node.silent"
            note(tx, kind, now, SHOAL, node=name)
        if msgspec.structs.replace(facts, is_alive=known.facts.is_alive) != known.facts:
            note(tx, "node.changed", now, SHOAL, node=name, data=msgspec.to_builtins(facts))


def _drop(core: Core, tx: Tx, vanished: list[str]) -> None:
    """A real node that is silent may come back; a simulated one that its engine lacks was given up, and one
    of an engine before was left behind, which is refused while something may run there.
    """
    held = {name for _, attempt in tx.attempts.holding() for name in attempt.node_names}
    for name in vanished:
        if name not in held and tx.nodes.get(name) is not None:
            tx.nodes.remove(name)
            note(tx, "node.removed", core.clock.now(), SHOAL, node=name)
