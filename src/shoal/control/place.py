"""One scheduling cycle: what changed, plan, guarded write."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import anyio
import anyio.lowlevel
import msgspec

from shoal.control.actor import SHOAL
from shoal.control.batches import batched
from shoal.control.core import Core
from shoal.control.decision import Basis, record_decision
from shoal.control.evict import evict
from shoal.control.queue import Changes, have_projects_changed, look
from shoal.control.relearn import last_runs, relearn
from shoal.control.replace import replace_elsewhere
from shoal.control.stopwatch import Stopwatch
from shoal.control.usage import recall
from shoal.model.attempt import Attempt, AttemptState, EndReason
from shoal.model.job import Job
from shoal.model.moves import Placed, StopAsked
from shoal.model.node import Node
from shoal.scheduler import Plan, Start
from shoal.scheduler.fair import Usage
from shoal.store import Tx

MAX_TAKEN_IN = 500
"""Jobs told to the queue without a pause: some 25 ms."""
MAX_AT_ONCE = 50
"""Starts, or ends of those that wait in vain, in one transaction."""
IN_VAIN_PATIENCE_S = 0.25
"""While the store is busy: who waits in vain held nothing that others wait for."""


class Cycle(NamedTuple):
    """What one cycle leaves its loop to do."""

    placed: tuple[str, ...]
    """Attempts to be handed to the engine."""
    next_look_s: float | None
    """When to look again if nothing happens before."""
    planning_s: float
    """What looking and planning took, in all threads; waiting for one of them or for the disk is not counted,
    nor is recording: that takes its time for each start, however often one plans."""


class Look(NamedTuple):
    """What is read before a plan."""

    changes: Changes
    usages: tuple[Usage, ...]
    runs: list[tuple[Job, Attempt]]
    """Before the first plan only, like `usages`: learned from once, since nothing is before all is read."""


async def recall_nodes(core: Core) -> None:
    """Know the nodes as recorded: what is submitted before the first look is judged by them."""
    _tell_nodes(core, await core.store.read(lambda tx: tx.nodes.all()))


def _tell_nodes(core: Core, nodes: list[Node]) -> None:
    if core.nodes.tell(core.planner, nodes):
        core.stamps.see(core.nodes.views())


async def place(core: Core) -> Cycle:
    """Plan once and record it. What it starts is on disk, and nobody has told the engine yet."""
    work = Stopwatch(core.clock)
    changes = await _look_around(core, work)
    # Not before the look: whoever gets the room of one that ended during it would be recorded beside it.
    now = core.clock.now()
    with work:
        _tell_nodes(core, changes.nodes)
        core.planner.set_windows(changes.windows)
    await _take_in(core, changes)
    if core.lost:
        moved = await replace_elsewhere(core, changes, now)
        core.placer.set()  # everybody else is planned for when that is known
        return Cycle(moved, 0.0, work.spent_s)
    with work:
        resting_s = core.queue.wake(now)
        saved, usages = dict(core.checkpoints.fresh), core.planner.rivals()
        made, doomed = core.planner.plan(now), core.queue.doomed
    placed: list[str] = []
    try:
        if made.starts or made.evictions or doomed:
            basis = Basis(
                at=now,
                seen=changes.seen,
                saved=saved if made.evictions else {},
                is_all_saved=bool(made.evictions) and not core.checkpoints.has_recorded,
                usages=usages,
                windows=changes.windows,
            )

            await _record_all(core, made, doomed, basis, placed)
            if made.starts or made.evictions:
                core.queue.fresh.clear()
            if made.evictions:
                core.checkpoints.recorded(saved)
    finally:
        # Also when the store is away or we are cancelled: what is not known to be on disk waits again.
        for start in made.starts:
            if start.attempt_id not in placed:
                core.planner.undo(start.attempt_id)
    for attempt_id in placed:
        core.foreseen.started(attempt_id, now)
    again_s = None if made.look_again_at is None else max(made.look_again_at - now, 0.0)
    waits = [wait for wait in (resting_s, again_s) if wait is not None]
    return Cycle(tuple(placed), min(waits, default=None), work.spent_s)


async def _take_in(core: Core, changes: Changes) -> None:
    """Some jobs at a time, and requests are answered in between."""
    *before, last = batched(changes.jobs, MAX_TAKEN_IN) or [[]]
    for some in before:
        core.queue.take_some(some, changes.outcomes)
        await anyio.lowlevel.checkpoint()
    core.queue.take_in(msgspec.structs.replace(changes, jobs=last))


async def _look_around(core: Core, work: Stopwatch) -> Changes:
    """What is new, as of one moment; before the first plan everything, and what runs took lately."""
    seen, half_life_s = core.queue.seen, core.planner.policy.half_life_s

    def read(tx: Tx) -> Look:
        if seen is not None:
            return Look(look(tx, seen), (), [])
        return Look(look(tx, None), recall(tx, half_life_s).usages, last_runs(tx))

    changes, usages, runs = await core.store.read(work.of(read))
    relearn(core.stamps, runs)
    if changes.projects is not None:
        core.projects.tell(core.planner, changes.projects, usages)
    return changes


async def _record_all(
    core: Core, made: Plan, doomed: list[tuple[str, str]], basis: Basis, placed: list[str]
) -> None:
    """Write the plan down, in transactions that delay nobody for long; `placed` grows as they are on disk.

    The decision comes with the last starts. After a crash in between, those before it run all the same.
    """
    for some in batched(doomed, MAX_AT_ONCE):
        await core.store.write(partial(_record_doomed, core, some), patience_s=IN_VAIN_PATIENCE_S)
    *before, last = batched(made.starts, MAX_AT_ONCE) or [()]
    for starts in before:
        placed += await core.store.write(partial(_record_starts, core, starts, basis))

    def record(tx: Tx) -> list[str]:
        more = _record_starts(core, last, basis, tx)
        evicted = evict(core, tx, made.evictions if _is_allowed(tx, basis) else (), basis.at)
        record_decision(core, tx, made, [*placed, *more], evicted, basis)
        return more

    if made.starts or made.evictions:
        placed += await core.store.write(record)


def _is_allowed(tx: Tx, basis: Basis) -> bool:
    """A window declared or a limit lowered since the look forbids what this plan gives away."""
    return tx.windows.all() == basis.windows and not have_projects_changed(tx, basis.seen)


def _record_doomed(core: Core, doomed: Sequence[tuple[str, str]], tx: Tx) -> None:
    for attempt_id, because in doomed:
        stop = StopAsked(reason=EndReason.DEPENDENCY, by=str(SHOAL), because=because)
        core.recorder.advance(tx, attempt_id, stop)


def _record_starts(core: Core, starts: Sequence[Start], basis: Basis, tx: Tx) -> list[str]:
    """Those that are placed. What changed since the look is left for the next cycle."""
    now = basis.at
    used = sorted({share.node for start in starts for share in start.allocation})
    open_nodes = {node.name for node in map(tx.nodes.get, used) if node is not None and node.takes_work}
    placed = []
    for start in starts if _is_allowed(tx, basis) else ():
        attempt = tx.attempts.get(start.attempt_id)
        if attempt is None or attempt.state is not AttemptState.QUEUED:
            continue
        if not all(share.node in open_nodes for share in start.allocation):
            continue
        core.recorder.advance(tx, start.attempt_id, Placed(allocation=start.allocation), now=now)
        placed.append(start.attempt_id)
    return placed
