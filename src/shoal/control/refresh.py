"""Keep the list of nodes true: what the engine has now, against what is recorded."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import structlog

from shoal.control.actor import SHOAL
from shoal.control.core import Core
from shoal.control.record import note
from shoal.errors import EngineUnreachable
from shoal.model.node import Node, NodeFacts, NodeState
from shoal.store import Tx

log = structlog.get_logger()


async def refresh_nodes(core: Core) -> None:
    """Record what the engine says of its nodes now. Changes nothing where it cannot be asked.

    One that it does not list is silent at first, and gone when that has lasted: else it would count as a
    place for work that no node could ever do. Forgotten are those of an engine before, those that were
    simulated, and after long those about which nobody decided anything. Neither happens to one that
    something holds.
    """
    with core.outages.asking():
        try:
            facts = {f.name: f for f in await core.engine.nodes()}
        except EngineUnreachable as error:
            log.warning("engine.unreachable", engine=core.engine.name, error=error.message)
            core.absences.unanswered()
            core.outages.unanswered(error.message)
            return
    core.outages.answered()
    known = {node.name: node for node in await core.store.read(lambda tx: tx.nodes.all())}
    core.absences.answered(known, facts)
    lost = {n: msgspec.structs.replace(node.facts, is_alive=False, closed="") for n, node in known.items()}
    wanted = {**lost, **facts}
    # A node is added when it answers: one that was removed while it is silent stays away until then.
    changed = {
        name: fact
        for name, fact in wanted.items()
        if (_is_news(core, known[name], fact, is_listed=name in facts) if name in known else fact.is_alive)
    }
    if changed:
        await core.store.write(lambda tx: _put(core, tx, changed, facts))
    unlisted = [node for name, node in known.items() if name not in facts]
    given_up = [node.name for node in unlisted if _is_given_up(core, node)]
    gone = [node.name for node in unlisted if core.absences.is_gone(node.name) and not node.is_gone]
    leaving = {*given_up, *gone}
    # One that something holds is found again at every look: no write for that.
    if leaving and not leaving <= await core.store.read(_held):
        await core.store.write(lambda tx: _let_go(core, tx, given_up, gone))


def _is_news(core: Core, known: Node, fact: NodeFacts, *, is_listed: bool) -> bool:
    return known.facts != fact or (is_listed and (known.is_gone or known.engine != core.engine.name))


def _is_given_up(core: Core, node: Node) -> bool:
    """What an operator said of a real node is kept for when this engine has it again."""
    is_left = node.state is NodeState.READY and core.absences.is_long_gone(node.name)
    return is_left or node.facts.is_simulated or node.engine != core.engine.name


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
        seen = {"engine": core.engine.name, "is_gone": False} if name in listed else {}
        tx.nodes.put(msgspec.structs.replace(known, facts=facts, **seen, version=known.version + 1))
        if known.is_gone and name in listed:
            note(tx, "node.back", now, SHOAL, node=name)
        if known.facts.answers != facts.answers:
            kind = "node.answers" if facts.answers else "node.silent"
            note(tx, kind, now, SHOAL, node=name)
        if known.facts.is_busy != facts.is_busy:
            note(tx, "node.busy" if facts.is_busy else "node.idle", now, SHOAL, node=name)
        told = {"is_alive": known.facts.is_alive, "is_busy": known.facts.is_busy}
        if msgspec.structs.replace(facts, **told) != known.facts:
            note(tx, "node.changed", now, SHOAL, node=name, data=msgspec.to_builtins(facts))


def _let_go(core: Core, tx: Tx, given_up: Collection[str], gone: Collection[str]) -> None:
    """But for what something may run on: that is a node until there is evidence that nothing does."""
    held = _held(tx)
    now = core.clock.now()
    for name in (*given_up, *(one for one in gone if one not in given_up)):
        node = tx.nodes.get(name)
        if name in held or node is None:
            continue
        if name in given_up:
            tx.nodes.remove(name)
            note(tx, "node.removed", now, SHOAL, node=name)
        else:
            tx.nodes.put(msgspec.structs.replace(node, is_gone=True, version=node.version + 1))
            note(tx, "node.gone", now, SHOAL, node=name)


def _held(tx: Tx) -> set[str]:
    return {name for _, attempt in tx.attempts.holding() for name in attempt.node_names}
