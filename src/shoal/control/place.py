"""One scheduling cycle: store, snapshot, plan, guarded write, engine."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from shoal.control.actor import SHOAL
from shoal.control.core import Core
from shoal.control.launch import launch
from shoal.control.queue import look
from shoal.control.record import note
from shoal.control.told import FRESH_S
from shoal.model.attempt import AttemptState, EndReason
from shoal.model.moves import Placed, StopAsked
from shoal.scheduler import Plan, plan
from shoal.store import Tx


class Cycle(NamedTuple):
    """What one cycle leaves its loop to know."""

    next_look_s: float | None
    """When to look again if nothing happens before."""
    planning_s: float
    """Until the plan was on disk. Starting what it starts is the engine's time, not ours."""


async def place(core: Core) -> Cycle:
    """Plan once and act on it."""
    began = core.clock.monotonic()
    next_look_s, placed = await _decide(core)
    planning_s = core.clock.monotonic() - began
    for attempt_id in placed:
        await launch(core, attempt_id)
    return Cycle(next_look_s, planning_s)


async def _decide(core: Core) -> tuple[float | None, list[str]]:
    """When to look again, and the attempts that may be started."""
    now, seen = core.clock.now(), core.queue.seen
    changes = await core.store.read(lambda tx: look(tx, seen))
    core.queue.take_in(changes)
    are_nodes_new = core.nodes.see(changes.nodes)
    if not are_nodes_new and _is_nothing_new(core):
        return core.told.good_until - core.clock.monotonic(), []
    core.queue.is_disturbed = True  # until all of this is done
    snapshot, next_ready_s = core.queue.snapshot(core.nodes.views(now), core.backoff, now)
    made, doomed = plan(snapshot, core.policy, now), core.queue.doomed
    core.told.hear(made, snapshot.candidates, now)
    placed: list[str] = []
    if made.starts or doomed:
        placed = await core.store.write(lambda tx: _record(core, tx, made, doomed))
    core.queue.settled()
    core.told.good_until = core.clock.monotonic() + min(FRESH_S, next_ready_s or FRESH_S)
    return next_ready_s, placed


def _is_nothing_new(core: Core) -> bool:
    """Nobody can start: at most, jobs came that ask what others are waiting for already."""
    if core.queue.is_disturbed or not core.told.explain(core.queue.added, core.clock.monotonic()):
        return False
    core.queue.settled()
    return True


def _record(core: Core, tx: Tx, made: Plan, doomed: list[tuple[str, str]]) -> list[str]:
    """Write the plan down. What changed since the snapshot is left for the next cycle."""
    open_nodes = {node.name for node in tx.nodes.all() if node.takes_work}
    placed = []
    for start in made.starts:
        attempt = tx.attempts.get(start.attempt_id)
        if attempt is None or attempt.state is not AttemptState.QUEUED:
            continue
        if not all(share.node in open_nodes for share in start.allocation):
            continue
        core.recorder.advance(tx, start.attempt_id, Placed(allocation=start.allocation))
        placed.append(start.attempt_id)
    for attempt_id, because in doomed:
        stop = StopAsked(reason=EndReason.DEPENDENCY, by=str(SHOAL), because=because)
        core.recorder.advance(tx, attempt_id, stop)
    if made.starts:
        _record_decision(core, tx, made, placed)
    return placed


def _record_decision(core: Core, tx: Tx, made: Plan, placed: list[str]) -> None:
    """What was decided and what of it was still possible, for whoever asks why later."""
    data = {
        "starts": msgspec.to_builtins(made.starts),
        "placed": placed,
        "waiting": len(made.explanations) + core.queue.num_blocked,
    }
    note(tx, "plan.made", core.clock.now(), SHOAL, data=data)
