"""Run the loops: when each wakes, how it pauses after a failure, and what happens then.

A loop that raises is logged and run again. Every loop starts from what is recorded, so a failure in one turn
is no different from a kill at that point.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio
import structlog

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
from shoal.control.memory.health import Signal
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


class CommitNotifier:
    """Tells streams and loops that something was committed."""

    def __init__(self) -> None:
        self._commit: anyio.Event | None = None
        """Set while a caller waits."""
        self._seq = -1
        self.plan_signal = Signal()
        self.heal_signal = Signal()

    def is_new(self, seq: int) -> bool:
        """Whether a commit brought events, judged by its newest event. A commit without events, such as a
        reservation of job numbers, changes nothing that is planned for or followed. Call this once for each
        commit, where it is announced.
        """
        before, self._seq = self._seq, seq
        return seq != before

    @property
    def is_awaited(self) -> bool:
        """Whether a caller waits for the next commit. Any thread may ask.

        A caller that was woken and has not looked sees this commit too, because it lowers its flag before it
        looks.
        """
        return self._commit is not None or not self.plan_signal.is_raised

    def notify(self) -> None:
        """Wake all callers: something new is on disk."""
        if self._commit is not None:
            self._commit.set()
            self._commit = None
        self.plan_signal.set()

    def wake_healer(self) -> None:
        self.heal_signal.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait until the next commit, or until the time is over."""
        if self._commit is None:
            self._commit = anyio.Event()
        with anyio.move_on_after(timeout_s):
            await self._commit.wait()


@asynccontextmanager
async def run_loops(core: Core, commits: CommitNotifier) -> AsyncIterator[None]:
    """Recover, then keep the loops running while the block lasts.

    If something cannot be done at once (a full disk, a database that is away), the loops do it as soon as
    they can. If the engine takes long to answer, the block begins before the loops have looked. Silence
    counts from the first look on. Until then submissions are judged by the recorded nodes. If there are none,
    `why` says that the cluster has not answered.
    """
    loop = asyncio.get_running_loop()

    def on_commit(seq: int) -> None:
        if commits.is_new(seq) and commits.is_awaited:
            loop.call_soon_threadsafe(commits.notify)

    def on_notice() -> None:
        loop.call_soon_threadsafe(core.watch_signal.set)

    core.plan_signal = commits.plan_signal
    core.store.on_commit(on_commit)
    if isinstance(core.engine, SupportsChangeNotices):
        core.engine.notify_changes(on_notice)
    await _run_turn(core, "place", lambda: load_recorded_nodes(core))
    has_looked = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_run_all, core, commits, has_looked)
        with anyio.move_on_after(FIRST_LOOK_S):
            await has_looked.wait()
        if not has_looked.is_set():
            core.outages.record_no_answer_yet(
                f"no answer within {FIRST_LOOK_S:g} s of the start of this control plane"
            )
        try:
            yield
        finally:
            tasks.cancel_scope.cancel()
            with anyio.move_on_after(FINAL_WRITE_S, shield=True):
                await write_refusals(core, is_all=True)


async def _run_all(core: Core, commits: CommitNotifier, has_looked: anyio.Event) -> None:
    """Run all loops. The first turns look at the nodes and at what runs, and nothing is decided
    before that.
    """
    await _run_turn(core, "heal", lambda: heal(core))
    await _run_turn(core, "place", lambda: load_recorded_nodes(core))  # of a new cluster, the first nodes
    await _run_turn(core, "watch", lambda: watch(core))
    has_looked.set()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_run_placement, core, commits)
        tasks.start_soon(
            _run_forever, core, "watch", lambda: watch(core), lambda: core.watch_signal.wait(WATCH_EVERY_S)
        )
        tasks.start_soon(
            _run_forever, core, "heal", lambda: heal(core), lambda: commits.heal_signal.wait(HEAL_EVERY_S)
        )
        tasks.start_soon(
            _run_forever, core, "anchor", lambda: drop_anchor(core), lambda: anyio.sleep(ANCHOR_EVERY_S)
        )
        tasks.start_soon(
            _run_forever, core, "audit", lambda: write_refusals(core), lambda: anyio.sleep(REFUSALS_EVERY_S)
        )
        tasks.start_soon(
            _run_forever, core, "learn", lambda: learn_from_newest(core), lambda: anyio.sleep(LEARN_EVERY_S)
        )
        tasks.start_soon(
            _run_forever, core, "drill", lambda: watch_drills(core), lambda: anyio.sleep(pause_s(core))
        )
        tasks.start_soon(
            _run_forever,
            core,
            "serve",
            lambda: reconcile_services(core),
            lambda: core.services.waker.wait(SERVE_EVERY_S),
        )
        tasks.start_soon(
            _run_forever, core, "arrays", lambda: finish_arrays(core), lambda: anyio.sleep(ARRAYS_EVERY_S)
        )
        tasks.start_soon(_run_forever, core, "clean", lambda: clean(core), lambda: anyio.sleep(CLEAN_EVERY_S))


async def _run_placement(core: Core, commits: CommitNotifier) -> None:
    next_look_s = 0.0
    at_once = anyio.CapacityLimiter(LAUNCHES_AT_ONCE)
    async with anyio.create_task_group() as launches:
        while True:
            await commits.plan_signal.wait(next_look_s)
            cycle = await _run_turn(core, "place", lambda: place(core)) or FAILED_CYCLE
            if cycle.placed:
                launches.start_soon(_launch_all, core, cycle.placed, at_once)
            next_look_s = min(cycle.next_look_s or PLACE_AT_LEAST_EVERY_S, PLACE_AT_LEAST_EVERY_S)
            await anyio.sleep(max(cycle.planning_s / PLANNING_SHARE - cycle.planning_s, PLACE_PAUSE_S))


async def _launch_all(core: Core, attempt_ids: tuple[str, ...], at_once: anyio.CapacityLimiter) -> None:
    """Launch the attempts. `watch` launches again what fails here, as it would after a crash."""
    try:
        taken = await begin_submission_of(core, attempt_ids)
    except Exception:
        log.exception("launch.failed", attempts=attempt_ids)
        return
    async with anyio.create_task_group() as launches:
        for starting in taken:
            launches.start_soon(_launch_one, core, starting, at_once)


async def _launch_one(core: Core, starting: StartingAttempt, at_once: anyio.CapacityLimiter) -> None:
    try:
        await submit_starting(core, starting, at_once)
    except Exception:
        log.exception("launch.failed", attempt=starting.attempt.attempt_id)


async def _run_forever(
    core: Core, name: str, turn: Callable[[], Awaitable[None]], pause: Callable[[], Awaitable[None]]
) -> None:
    while True:
        await _run_turn(core, name, turn)
        await pause()


async def _run_turn(core: Core, name: str, turn: Callable[[], Awaitable[T]]) -> T | None:
    try:
        done = await turn()
    except StoreUnavailable as error:
        log.warning("loop.store_unavailable", loop=name, error=error.message)
        core.loop_health.record_failure(name, error)
    except Exception as error:
        log.exception("loop.failed", loop=name)
        core.loop_health.record_failure(name, error)
    else:
        core.loop_health.record_success(name)
        return done
    await anyio.sleep(FAILED_PAUSE_S)
    return None
