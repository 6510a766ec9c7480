"""Keep the list of nodes current: compare what the engine lists now with what is recorded."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import structlog

from shoal.clock import Clock
from shoal.control.actor import SHOAL
from shoal.control.capabilities import EngineLink, Records
from shoal.control.record import record_event
from shoal.engines.base import Engine
from shoal.errors import EngineUnreachable
from shoal.model.node import Node, NodeFacts, NodeState
from shoal.store import Tx

log = structlog.get_logger()


async def refresh_nodes(records: Records, link: EngineLink) -> None:
    """Record what the engine says of its nodes now. Change nothing if it does not answer.

    A node that the engine does not list is silent at first, and gone after 10 minutes of such answers.
    Otherwise it would count as a place for work that no node could ever do. Three kinds of nodes are
    forgotten: those of an earlier engine, simulated ones, and after a day those without an operator's
    decision. A node that holds resources is neither gone nor forgotten.
    """
    with link.outages.asking():
        try:
            facts = {f.name: f for f in await link.engine.nodes()}
        except EngineUnreachable as error:
            log.warning("engine.unreachable", engine=link.engine.name, error=error.message)
            link.missing_nodes.record_failure()
            link.outages.record_failure(error.message)
            return
    link.outages.record_answer()
    recorded = {node.name: node for node in await records.store.read(lambda tx: tx.nodes.all())}
    link.missing_nodes.record_answer(recorded, facts)
    lost = {n: msgspec.structs.replace(node.facts, is_alive=False, closed="") for n, node in recorded.items()}
    wanted = {**lost, **facts}
    # A node is added when it answers. A node that was removed while it was silent stays away until then.
    changed = {
        name: fact
        for name, fact in wanted.items()
        if (
            _is_news(link.engine, recorded[name], fact, is_listed=name in facts)
            if name in recorded
            else fact.is_alive
        )
    }
    if changed:
        await records.store.write(lambda tx: _record_facts(records.clock, link.engine, tx, changed, facts))
    unlisted = [node for name, node in recorded.items() if name not in facts]
    given_up = [node.name for node in unlisted if _is_given_up(link, node)]
    gone = [node.name for node in unlisted if link.missing_nodes.is_gone(node.name) and not node.is_gone]
    leaving = {*given_up, *gone}
    # A node that holds resources is found again at every look: no write for that.
    if leaving and not leaving <= await records.store.read(_held):
        await records.store.write(lambda tx: _drop_or_mark_gone(records.clock, tx, given_up, gone))


def _is_news(engine: Engine, recorded: Node, fact: NodeFacts, *, is_listed: bool) -> bool:
    return recorded.facts != fact or (is_listed and (recorded.is_gone or recorded.engine != engine.name))


def _is_given_up(link: EngineLink, node: Node) -> bool:
    """Whether to forget the node. An operator's decision about a real node is kept for when this engine has
    the node again.
    """
    is_left = node.state is NodeState.READY and link.missing_nodes.is_long_gone(node.name)
    return is_left or node.facts.is_simulated or node.engine != link.engine.name


def _record_facts(
    clock: Clock, engine: Engine, tx: Tx, changed: dict[str, NodeFacts], listed: Collection[str]
) -> None:
    now = clock.now()
    for name, facts in sorted(changed.items()):
        node = tx.nodes.get(name)
        if node is None and not facts.is_alive:
            continue
        if node is None:
            tx.nodes.put(Node(facts=facts, engine=engine.name, changed_at=now))
            record_event(tx, "node.added", now, SHOAL, node=name, data=msgspec.to_builtins(facts))
            continue
        seen = {"engine": engine.name, "is_gone": False} if name in listed else {}
        tx.nodes.put(msgspec.structs.replace(node, facts=facts, **seen, version=node.version + 1))
        if node.is_gone and name in listed:
            record_event(tx, "node.back", now, SHOAL, node=name)
        if node.facts.answers != facts.answers:
            kind = "node.answers" if facts.answers else "node.silent"
            record_event(tx, kind, now, SHOAL, node=name)
        if node.facts.is_busy != facts.is_busy:
            record_event(tx, "node.busy" if facts.is_busy else "node.idle", now, SHOAL, node=name)
        unchanged = {"is_alive": node.facts.is_alive, "is_busy": node.facts.is_busy}
        if msgspec.structs.replace(facts, **unchanged) != node.facts:
            record_event(tx, "node.changed", now, SHOAL, node=name, data=msgspec.to_builtins(facts))


def _drop_or_mark_gone(clock: Clock, tx: Tx, given_up: Collection[str], gone: Collection[str]) -> None:
    """Forget nodes or mark them as gone, except those on which something may run. Such a node stays until
    there is evidence that nothing runs there.
    """
    held = _held(tx)
    now = clock.now()
    for name in (*given_up, *(gone_name for gone_name in gone if gone_name not in given_up)):
        node = tx.nodes.get(name)
        if name in held or node is None:
            continue
        if name in given_up:
            tx.nodes.remove(name)
            record_event(tx, "node.removed", now, SHOAL, node=name)
        else:
            tx.nodes.put(msgspec.structs.replace(node, is_gone=True, version=node.version + 1))
            record_event(tx, "node.gone", now, SHOAL, node=name)


def _held(tx: Tx) -> set[str]:
    return {name for _, attempt in tx.attempts.holding() for name in attempt.node_names}
