"""One scheduling cycle: store, snapshot, plan, guarded write, engine."""

from __future__ import annotations

import msgspec

from shoal.control.actor import SHOAL
from shoal.control.core import Core
from shoal.control.launch import launch
from shoal.control.record import note
from shoal.control.snapshot import Loaded, load
from shoal.model.attempt import AttemptState, EndReason
from shoal.model.moves import Placed, StopAsked
from shoal.scheduler import Plan, plan
from shoal.store import Tx


async def place(core: Core) -> float | None:
    """Plan once and act on it. Returns when to look again if nothing happens before: seconds, or None."""
    now = core.clock.now()
    loaded = await core.store.read(lambda tx: load(tx, core.backoff, now))
    core.nodes.see(loaded.snapshot.nodes)
    made = plan(loaded.snapshot, core.policy, now)
    core.explanations = {e.attempt_id: e for e in made.explanations}
    if made.starts or loaded.doomed:
        placed = await core.store.write(lambda tx: _record(core, tx, made, loaded))
        for attempt_id in placed:
            await launch(core, attempt_id)
    return loaded.next_ready_s


def _record(core: Core, tx: Tx, made: Plan, loaded: Loaded) -> list[str]:
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
    for attempt_id, because in loaded.doomed:
        stop = StopAsked(reason=EndReason.DEPENDENCY, by=because)
        core.recorder.advance(tx, attempt_id, stop)
    if made.starts:
        _record_decision(core, tx, made, placed)
    return placed


def _record_decision(core: Core, tx: Tx, made: Plan, placed: list[str]) -> None:
    """What was decided and what of it was still possible, for whoever asks why later."""
    data = {
        "starts": msgspec.to_builtins(made.starts),
        "placed": placed,
        "waiting": len(made.explanations),
    }
    note(tx, "plan.made", core.clock.now(), SHOAL, data=data)
