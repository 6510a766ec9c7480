"""Run the loops: when each wakes, how it pauses after a failure, and what happens then.

A loop that raises is logged and run again. Every loop starts from what is recorded, so a failure in one turn
is no different from a kill at that point.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeVar

import anyio
import structlog

from shoal.control.capabilities import Planning, SubmissionInputs, Upkeep
from shoal.control.commands.arrays import finish_arrays
from shoal.control.commands.audit import write_refusals
from shoal.control.commands.explain import learn_from_newest
from shoal.control.core import Core
from shoal.control.loops.anchor import drop_anchor
from shoal.control.loops.clean import clean
from shoal.control.loops.drill_watch import pause_s, watch_drills
from shoal.control.loops.heal import heal
from shoal.control.loops.launch import StartingAttempt, begin_submission_of, submit_starting
from shoal.control.loops.place import PlacementCycle, load_recorded_nodes, place
from shoal.control.loops.watch import watch
from shoal.control.memory.health import LoopHealth
from shoal.control.services.reconcile import reconcile_services
from shoal.engines.base import SupportsChangeNotices
from shoal.errors import StoreUnavailable

log = structlog.get_logger()
T = TypeVar("T")

WATCH_EVERY_S = 1.0
HEAL_EVERY_S = 5.0
ANCHOR_EVERY_S = 30.0
REFUSALS_EVERY_S = 5.0
FINAL_WRITE_S = 2.0
"""Time to record the last refusals at the end."""
CLEAN_EVERY_S = 600.0
LEARN_EVERY_S = 60.0
SERVE_EVERY_S = 0.5
ARRAYS_EVERY_S = 5.0
PLACE_AT_LEAST_EVERY_S = 30.0
PLANNING_SHARE = 0.5
"""At most this share of a core goes to reading and planning. The longer a cycle took, the
longer the pause.
"""
PLACE_PAUSE_S = 0.005
"""The least pause between two cycles. Commits within it are planned together. The first cycle never waits."""
LAUNCHES_AT_ONCE = 32
"""Attempts handed to the engine at once while the next ones are planned."""
FIRST_LOOK_S = 5.0
"""The longest time that the first look delays a start. A cluster that is away may take minutes to fail.
Renewals have to be answered meanwhile, or supervisors end healthy ranks by their fence.
"""
FAILED_PAUSE_S = 1.0
FAILED_CYCLE = PlacementCycle(placed=(), next_look_s=None, planning_s=0.0)
"""The result of a cycle that raised. The pause after the failure has already happened."""


@asynccontextmanager
async def run_loops(core: Core) -> AsyncIterator[None]:
    """Recover, then keep the loops running while the block lasts.

    If something cannot be done at once (a full disk, a database that is away), the loops do it as soon as
    they can. If the engine takes long to answer, the block begins before the loops have looked. Silence
    counts from the first look on. Until then submissions are judged by the recorded nodes. If there are none,
    `why` says that the cluster has not answered.
    """
    loop, commits = asyncio.get_running_loop(), core.signals.commits

    def on_commit(seq: int) -> None:
        if commits.is_new(seq) and commits.is_awaited:
            loop.call_soon_threadsafe(commits.notify)

    def on_notice() -> None:
        loop.call_soon_threadsafe(core.signals.watch.set)

    core.records.store.on_commit(on_commit)
    if isinstance(core.link.engine, SupportsChangeNotices):
        core.link.engine.notify_changes(on_notice)
    await _run_turn(core.loop_health, "place", lambda: load_recorded_nodes(core.records.store, core.planning))
    has_looked = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_run_all, core, has_looked)
        with anyio.move_on_after(FIRST_LOOK_S):
            await has_looked.wait()
        if not has_looked.is_set():
            core.link.outages.record_no_answer_yet(
                f"no answer within {FIRST_LOOK_S:g} s of the start of this control plane"
            )
        try:
            yield
        finally:
            tasks.cancel_scope.cancel()
            with anyio.move_on_after(FINAL_WRITE_S, shield=True):
                await write_refusals(core.records, core.refusals, is_all=True)


async def _run_all(core: Core, has_looked: anyio.Event) -> None:
    """Run all loops. The first turns look at the nodes and at what runs, and nothing is decided
    before that.
    """
    health = core.loop_health
    await _run_turn(health, "heal", lambda: heal(core.upkeep))
    # Of a new cluster, the first nodes.
    await _run_turn(health, "place", lambda: load_recorded_nodes(core.records.store, core.planning))
    await _run_turn(health, "watch", lambda: watch(core.upkeep, core.inputs))
    has_looked.set()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_run_placement, health, core.upkeep, core.inputs, core.planning)
        for loop in _loops(core):
            tasks.start_soon(_run_forever, health, loop)


class Loop(NamedTuple):
    """A loop that takes turns until the control plane ends."""

    name: str
    turn: Callable[[], Awaitable[None]]
    pause: Callable[[], Awaitable[None]]


def _loops(core: Core) -> list[Loop]:
    """Return every loop but placement, with what it may touch and when it wakes."""
    records, store, engine = core.records, core.records.store, core.link.engine
    return [
        Loop(
            "watch",
            lambda: watch(core.upkeep, core.inputs),
            lambda: core.signals.watch.wait(WATCH_EVERY_S),
        ),
        Loop("heal", lambda: heal(core.upkeep), lambda: core.signals.heal.wait(HEAL_EVERY_S)),
        Loop("anchor", lambda: drop_anchor(core.anchors, store), lambda: anyio.sleep(ANCHOR_EVERY_S)),
        Loop("audit", lambda: write_refusals(records, core.refusals), lambda: anyio.sleep(REFUSALS_EVERY_S)),
        Loop(
            "learn",
            lambda: learn_from_newest(records.clock, core.planning, engine),
            lambda: anyio.sleep(LEARN_EVERY_S),
        ),
        Loop(
            "drill",
            lambda: watch_drills(records, core.running),
            lambda: anyio.sleep(pause_s(core.running)),
        ),
        Loop(
            "serve",
            lambda: reconcile_services(core.admission, core.serving, core.running),
            lambda: core.services.waker.wait(SERVE_EVERY_S),
        ),
        Loop(
            "arrays",
            lambda: finish_arrays(records, engine, core.sealing),
            lambda: anyio.sleep(ARRAYS_EVERY_S),
        ),
        Loop(
            "clean",
            lambda: clean(records, core.planning.planner, engine, core.settings),
            lambda: anyio.sleep(CLEAN_EVERY_S),
        ),
    ]


async def _run_placement(
    health: LoopHealth, upkeep: Upkeep, inputs: SubmissionInputs, planning: Planning
) -> None:
    next_look_s = 0.0
    at_once = anyio.CapacityLimiter(LAUNCHES_AT_ONCE)
    async with anyio.create_task_group() as launches:
        while True:
            await upkeep.signals.plan.wait(next_look_s)
            cycle = await _run_turn(health, "place", lambda: place(upkeep, planning)) or FAILED_CYCLE
            if cycle.placed:
                launches.start_soon(_launch_all, upkeep, inputs, cycle.placed, at_once)
            next_look_s = min(cycle.next_look_s or PLACE_AT_LEAST_EVERY_S, PLACE_AT_LEAST_EVERY_S)
            await anyio.sleep(max(cycle.planning_s / PLANNING_SHARE - cycle.planning_s, PLACE_PAUSE_S))


async def _launch_all(
    upkeep: Upkeep, inputs: SubmissionInputs, attempt_ids: tuple[str, ...], at_once: anyio.CapacityLimiter
) -> None:
    """Launch the attempts. `watch` launches again what fails here, as it would after a crash."""
    try:
        taken = await begin_submission_of(upkeep.records.store, upkeep.running, attempt_ids)
    except Exception:
        log.exception("launch.failed", attempts=attempt_ids)
        return
    async with anyio.create_task_group() as launches:
        for starting in taken:
            launches.start_soon(_launch_one, upkeep, inputs, starting, at_once)


async def _launch_one(
    upkeep: Upkeep, inputs: SubmissionInputs, starting: StartingAttempt, at_once: anyio.CapacityLimiter
) -> None:
    try:
        await submit_starting(upkeep, inputs, starting, at_once)
    except Exception:
        log.exception("launch.failed", attempt=starting.attempt.attempt_id)


async def _run_forever(health: LoopHealth, loop: Loop) -> None:
    while True:
        await _run_turn(health, loop.name, loop.turn)
        await loop.pause()


async def _run_turn(health: LoopHealth, name: str, turn: Callable[[], Awaitable[T]]) -> T | None:
    try:
        done = await turn()
    except StoreUnavailable as error:
        log.warning("loop.store_unavailable", loop=name, error=error.message)
        health.record_failure(name, error)
    except Exception as error:
        log.exception("loop.failed", loop=name)
        health.record_failure(name, error)
    else:
        health.record_success(name)
        return done
    await anyio.sleep(FAILED_PAUSE_S)
    return None
