"""One scheduling cycle: read what changed, plan, record with guarded writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Self, TypeVar

import anyio
import anyio.lowlevel
import msgspec

from shoal.clock import Clock
from shoal.control.actor import SHOAL
from shoal.control.capabilities import Planning, Upkeep
from shoal.control.loops.decision import DecisionBasis, evict, record_decision
from shoal.control.loops.project_usage import recall_usage
from shoal.control.loops.replace import note_replacements, record_replacement
from shoal.control.memory.queue import JobQueue, StoreChanges, read_changes
from shoal.control.memory.running import LostTask, RunningAttempts
from shoal.control.memory.start_predictions import last_runs, learn_run_times
from shoal.control.record import AttemptRecorder, batched
from shoal.model.attempt import Attempt, AttemptState, EndReason
from shoal.model.job import Job
from shoal.model.moves import AttemptPlaced, StopRequested
from shoal.model.node import Node
from shoal.scheduler import Plan, PlannedReplacement, PlannedStart, Planner, TaskLoss
from shoal.scheduler.order.fair_share import Usage
from shoal.store import Store, Tx

Given = TypeVar("Given")
Made = TypeVar("Made")


class Stopwatch:
    """Measures the time inside its `with` blocks, one at a time, in any thread. Waiting for a thread or a
    disk does not count.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = 0.0
        self.spent_s = 0.0

    def __enter__(self) -> Self:
        self._began = self._clock.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.spent_s += self._clock.monotonic() - self._began

    def wrap(self, work: Callable[[Given], Made]) -> Callable[[Given], Made]:
        """Return `work`, timed whenever it runs."""

        def timed(argument: Given) -> Made:
            with self:
                return work(argument)

        return timed


MAX_APPLIED_AT_ONCE = 500
"""Jobs passed to the queue without a pause: some 25 ms."""
MAX_AT_ONCE = 50
"""Starts and replacements, or ends of doomed attempts, in one transaction."""
DOOMED_PATIENCE_S = 0.25
"""While the store is busy, ends of doomed attempts can wait, because they hold nothing that others need."""


class PlacementCycle(NamedTuple):
    """What one cycle leaves for its loop to do."""

    placed: tuple[str, ...]
    """Attempts to hand to the engine."""
    next_look_s: float | None
    """When to look again if nothing happens before."""
    planning_s: float
    """Time for reading and planning, in all threads. Waiting for a thread or the disk does not count.
    Recording does not count either, because each start needs it no matter how often one plans.
    """


class PlanInput(NamedTuple):
    """What is read before a plan."""

    changes: StoreChanges
    usages: tuple[Usage, ...]
    runs: list[tuple[Job, Attempt]]
    """Like `usages`, only before the first plan, because no later plan needs the past."""


async def load_recorded_nodes(store: Store, planning: Planning) -> None:
    """Load the recorded nodes. Submissions before the first look are judged by them."""
    _update_nodes(planning, await store.read(lambda tx: tx.nodes.all()))


def _update_nodes(planning: Planning, nodes: list[Node]) -> None:
    if planning.nodes.update(planning.planner, nodes):
        planning.stamps.see(planning.nodes.views())


async def place(upkeep: Upkeep, planning: Planning) -> PlacementCycle:
    """Plan once and record the plan. Its starts and replacements are on disk when this returns, and the
    engine does not know of them.
    """
    work = Stopwatch(upkeep.records.clock)
    changes = await _read_input(upkeep.records.store, planning, work)
    # Not before the look. Otherwise a job that gets the room of one that ended during the look would be
    # recorded beside it.
    now = upkeep.records.clock.now()
    with work:
        _update_nodes(planning, changes.nodes)
        planning.planner.set_windows(changes.windows)
    await _apply_changes(planning.queue, changes)
    with work:
        resting_s = planning.queue.wake(now)
        lost_tasks = _give_lost_tasks(upkeep.running, planning.planner)
        usages = planning.planner.competing_usages()
        plan, doomed = planning.planner.plan(now), planning.queue.doomed
        saved = upkeep.running.checkpoint_times.unrecorded() if plan.evictions else {}
    placed: list[str] = []
    try:
        if plan.starts or plan.evictions or plan.replacements or doomed:
            basis = DecisionBasis(
                at=now,
                seen_seq=changes.seen_seq,
                saved=saved,
                is_all_saved=bool(plan.evictions) and not upkeep.running.checkpoint_times.has_recorded,
                usages=usages,
                windows=changes.windows,
            )

            await _record_all(upkeep, planning, plan, lost_tasks, doomed, basis, placed)
            note_replacements(upkeep, plan.replacements, placed)
            if plan.starts or plan.evictions or plan.replacements:
                planning.queue.fresh_stamps.clear()
            if plan.evictions:
                upkeep.running.checkpoint_times.mark_recorded(saved)
    finally:
        # Also if the store is away or this task is cancelled: a start that is not known to be on disk waits
        # again, and `watch` finds a lost task again.
        for planned in plan.placements:
            if planned.attempt_id not in placed:
                planning.planner.undo(planned.attempt_id)
    for attempt_id in placed:
        planning.predictions.note_start(attempt_id, now)
    again_s = None if plan.replan_at is None else max(plan.replan_at - now, 0.0)
    waits = [wait for wait in (resting_s, again_s) if wait is not None]
    return PlacementCycle(tuple(placed), min(waits, default=None), work.spent_s)


def _give_lost_tasks(running: RunningAttempts, planner: Planner) -> dict[str, LostTask]:
    """Give the planner all lost tasks, and return them. `watch` may add more from the store's thread
    meanwhile: these wait for the next cycle.
    """
    lost_tasks: dict[str, LostTask] = {}
    while running.lost_tasks:
        attempt_id, lost = running.lost_tasks.popitem()
        lost_tasks[attempt_id] = lost
    planner.set_losses(
        TaskLoss(attempt_id=attempt_id, node=lost.outcome.node) for attempt_id, lost in lost_tasks.items()
    )
    return lost_tasks


async def _apply_changes(queue: JobQueue, changes: StoreChanges) -> None:
    """Apply a few jobs at a time. Requests are answered in between."""
    *before, last = batched(changes.jobs, MAX_APPLIED_AT_ONCE) or [[]]
    for some in before:
        queue.apply_some(some, changes.outcomes)
        await anyio.lowlevel.checkpoint()
    queue.apply(msgspec.structs.replace(changes, jobs=last))


async def _read_input(store: Store, planning: Planning, work: Stopwatch) -> StoreChanges:
    """Read what is new, as of one moment. Before the first plan: everything, and recent run times."""
    seen, half_life_s = planning.queue.seen_seq, planning.planner.policy.half_life_s

    def read(tx: Tx) -> PlanInput:
        if seen is not None:
            return PlanInput(read_changes(tx, seen), (), [])
        return PlanInput(read_changes(tx, None), recall_usage(tx, half_life_s).usages, last_runs(tx))

    changes, usages, runs = await store.read(work.wrap(read))
    learn_run_times(planning.stamps, runs)
    if changes.projects is not None:
        planning.projects.update(planning.planner, changes.projects, usages)
    return changes


async def _record_all(
    upkeep: Upkeep,
    planning: Planning,
    plan: Plan,
    lost_tasks: dict[str, LostTask],
    doomed: list[tuple[str, str]],
    basis: DecisionBasis,
    placed: list[str],
) -> None:
    """Record the plan in transactions that are short enough for other writers. `placed` grows as starts and
    replacements reach the disk.

    The decision is recorded with the last of them. After a crash in between, those before it run all the
    same.
    """
    for some in batched(doomed, MAX_AT_ONCE):
        await upkeep.records.store.write(
            partial(_record_doomed, upkeep.records.recorder, some), patience_s=DOOMED_PATIENCE_S
        )
    *before, last = batched(plan.placements, MAX_AT_ONCE) or [()]
    for some_planned in before:
        placed += await upkeep.records.store.write(
            partial(_record_placements, upkeep, plan, some_planned, lost_tasks, basis)
        )

    def record(tx: Tx) -> list[str]:
        more = _record_placements(upkeep, plan, last, lost_tasks, basis, tx)
        evictions = plan.evictions if basis.is_still_valid(tx) else ()
        evicted = evict(upkeep.records.recorder, tx, evictions, basis.at)
        record_decision(planning, tx, plan, [*placed, *more], evicted, basis)
        return more

    if plan.starts or plan.evictions or plan.replacements:
        placed += await upkeep.records.store.write(record)


def _record_doomed(recorder: AttemptRecorder, doomed: Sequence[tuple[str, str]], tx: Tx) -> None:
    for attempt_id, because in doomed:
        stop = StopRequested(reason=EndReason.DEPENDENCY, by=str(SHOAL), because=because)
        recorder.advance(tx, attempt_id, stop)


def _record_placements(
    upkeep: Upkeep,
    plan: Plan,
    some: Sequence[PlannedReplacement | PlannedStart],
    lost_tasks: dict[str, LostTask],
    basis: DecisionBasis,
    tx: Tx,
) -> list[str]:
    """Record some of the plan's starts and replacements, and return the attempts to hand over."""
    why_not = {explanation.attempt_id: explanation.sentence for explanation in plan.explanations}
    moved = [
        planned.attempt_id
        for planned in some
        if isinstance(planned, PlannedReplacement)
        and record_replacement(
            upkeep, tx, planned, lost_tasks[planned.attempt_id], basis, why_not.get(planned.attempt_id, "")
        )
    ]
    starts = [planned for planned in some if isinstance(planned, PlannedStart)]
    return [*moved, *_record_starts(upkeep.records.recorder, starts, basis, tx)]


def _record_starts(
    recorder: AttemptRecorder, starts: Sequence[PlannedStart], basis: DecisionBasis, tx: Tx
) -> list[str]:
    """Record starts that are still possible, and return their ids. The next cycle plans the others."""
    now = basis.at
    used = sorted({task.node for start in starts for task in start.allocation})
    open_nodes = {node.name for node in map(tx.nodes.get, used) if node is not None and node.takes_work}
    placed = []
    for start in starts if basis.is_still_valid(tx) else ():
        attempt = tx.attempts.get(start.attempt_id)
        if attempt is None or attempt.state is not AttemptState.QUEUED:
            continue
        if not all(task.node in open_nodes for task in start.allocation):
            continue
        recorder.advance(tx, start.attempt_id, AttemptPlaced(allocation=start.allocation), now=now)
        placed.append(start.attempt_id)
    return placed
