"""Run the loops for real: when they wake, how they back off, and what happens when one fails.

A loop that raises is logged and run again: every loop starts from what is recorded, so a failure in
one turn is no different from being killed there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio
import structlog

from shoal.control.anchor import drop_anchor
from shoal.control.arrays import carry_on
from shoal.control.audit import write_refusals
from shoal.control.clean import clean
from shoal.control.core import Core
from shoal.control.drill_watch import pause_s, watch_drills
from shoal.control.heal import heal
from shoal.control.launch import Starting, hand_over, take
from shoal.control.outlook import learn
from shoal.control.place import Cycle, place, recall_nodes
from shoal.control.services.turn import tend
from shoal.control.signals import Signal
from shoal.control.watch import watch
from shoal.engines.base import SupportsNotice
from shoal.errors import StoreUnavailable

log = structlog.get_logger()
T = TypeVar("T")

WATCH_EVERY_S = 1.0
HEAL_EVERY_S = 5.0
ANCHOR_EVERY_S = 30.0
REFUSALS_EVERY_S = 5.0
LAST_WORDS_S = 2.0
"""To write down what was refused until the end."""
CLEAN_EVERY_S = 600.0
LEARN_EVERY_S = 60.0
SERVE_EVERY_S = 0.5
CARRY_ON_EVERY_S = 5.0
PLACE_AT_LEAST_EVERY_S = 30.0
PLANNING_SHARE = 0.5
"""At most this share of a core goes to looking and planning: the longer it took, the longer the pause."""
PLACE_PAUSE_S = 0.005
"""Between two cycles at least: what commits within it is planned together. The first never waits."""
LAUNCHES_AT_ONCE = 32
"""Attempts being handed to the engine while the next ones are planned."""
FIRST_LOOK_S = 5.0
"""So long at most the first look keeps a start. A cluster that is away may take minutes to say nothing: who
renews has to be heard meanwhile, or ends healthy ranks by its fence."""
FAILED_PAUSE_S = 1.0
FAILED_CYCLE = Cycle(placed=(), next_look_s=None, planning_s=0.0)
"""After one that raised, which has paused for it already."""


class Changed:
    """Tells streams and loops that something was committed."""

    def __init__(self) -> None:
        self._commit: anyio.Event | None = None
        """There while somebody waits."""
        self._seq = -1
        self.placer = Signal()
        self.healer = Signal()

    def is_new(self, seq: int) -> bool:
        """Whether a commit brought events, by its newest: without any, as when numbers of jobs are kept,
        nothing has changed that is planned for or followed. Asked once for each, where it is announced.
        """
        before, self._seq = self._seq, seq
        return seq != before

    @property
    def is_awaited(self) -> bool:
        """Whether anybody has to be told of a commit. May be asked from any thread.

        Who was told already and has not looked yet will see this commit too: flags go down before a look.
        """
        return self._commit is not None or not self.placer.is_raised

    def committed(self) -> None:
        """Something is on disk that was not."""
        if self._commit is not None:
            self._commit.set()
            self._commit = None
        self.placer.set()

    def wake_healer(self) -> None:
        self.healer.set()

    async def wait(self, timeout_s: float) -> None:
        """Until the next commit, or until the time is over."""
        if self._commit is None:
            self._commit = anyio.Event()
        with anyio.move_on_after(timeout_s):
            await self._commit.wait()


@asynccontextmanager
async def run_loops(core: Core, changed: Changed) -> AsyncIterator[None]:
    """Recover, then keep the loops running while the block lasts.

    What cannot be done at once (a full disk, a database away) is done by the loops as soon as it can. Where
    the engine takes long to answer, the block begins before they do: silence counts from the first look on,
    and what is submitted until then is judged by the nodes that were known before, where there were any: else
    `why` says that nobody could, and then what came of it.
    """
    loop = asyncio.get_running_loop()

    def on_commit(seq: int) -> None:
        if changed.is_new(seq) and changed.is_awaited:
            loop.call_soon_threadsafe(changed.committed)

    def on_notice() -> None:
        loop.call_soon_threadsafe(core.watcher.set)

    core.placer = changed.placer
    core.store.on_commit(on_commit)
    if isinstance(core.engine, SupportsNotice):
        core.engine.notice(on_notice)
    await _turn(core, "place", lambda: recall_nodes(core))
    has_looked = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_looping, core, changed, has_looked)
        with anyio.move_on_after(FIRST_LOOK_S):
            await has_looked.wait()
        if not has_looked.is_set():
            core.outages.awaited(f"no answer within {FIRST_LOOK_S:g} s of the start of this control plane")
        try:
            yield
        finally:
            tasks.cancel_scope.cancel()
            with anyio.move_on_after(LAST_WORDS_S, shield=True):
                await write_refusals(core, is_all=True)


async def _looping(core: Core, changed: Changed, has_looked: anyio.Event) -> None:
    """Nothing is decided before it was looked at what there is, and what runs."""
    await _turn(core, "heal", lambda: heal(core))
    await _turn(core, "place", lambda: recall_nodes(core))  # of a new cluster, the first that are known
    await _turn(core, "watch", lambda: watch(core))
    has_looked.set()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_placing, core, changed)
        tasks.start_soon(
            _repeat, core, "watch", lambda: watch(core), lambda: core.watcher.wait(WATCH_EVERY_S)
        )
        tasks.start_soon(_repeat, core, "heal", lambda: heal(core), lambda: changed.healer.wait(HEAL_EVERY_S))
        tasks.start_soon(
            _repeat, core, "anchor", lambda: drop_anchor(core), lambda: anyio.sleep(ANCHOR_EVERY_S)
        )
        tasks.start_soon(
            _repeat, core, "audit", lambda: write_refusals(core), lambda: anyio.sleep(REFUSALS_EVERY_S)
        )
        tasks.start_soon(_repeat, core, "learn", lambda: learn(core), lambda: anyio.sleep(LEARN_EVERY_S))
        tasks.start_soon(
            _repeat, core, "drill", lambda: watch_drills(core), lambda: anyio.sleep(pause_s(core))
        )
        tasks.start_soon(
            _repeat, core, "serve", lambda: tend(core), lambda: core.services.waker.wait(SERVE_EVERY_S)
        )
        tasks.start_soon(
            _repeat, core, "arrays", lambda: carry_on(core), lambda: anyio.sleep(CARRY_ON_EVERY_S)
        )
        tasks.start_soon(_repeat, core, "clean", lambda: clean(core), lambda: anyio.sleep(CLEAN_EVERY_S))


async def _placing(core: Core, changed: Changed) -> None:
    next_look_s = 0.0
    at_once = anyio.CapacityLimiter(LAUNCHES_AT_ONCE)
    async with anyio.create_task_group() as launches:
        while True:
            await changed.placer.wait(next_look_s)
            cycle = await _turn(core, "place", lambda: place(core)) or FAILED_CYCLE
            if cycle.placed:
                launches.start_soon(_launching, core, cycle.placed, at_once)
            next_look_s = min(cycle.next_look_s or PLACE_AT_LEAST_EVERY_S, PLACE_AT_LEAST_EVERY_S)
            await anyio.sleep(max(cycle.planning_s / PLANNING_SHARE - cycle.planning_s, PLACE_PAUSE_S))


async def _launching(core: Core, attempt_ids: tuple[str, ...], at_once: anyio.CapacityLimiter) -> None:
    """What fails is launched again by `watch`, as it would be after a crash."""
    try:
        taken = await take(core, attempt_ids)
    except Exception:
        log.exception("launch.failed", attempts=attempt_ids)
        return
    async with anyio.create_task_group() as launches:
        for starting in taken:
            launches.start_soon(_handing_over, core, starting, at_once)


async def _handing_over(core: Core, starting: Starting, at_once: anyio.CapacityLimiter) -> None:
    try:
        await hand_over(core, starting, at_once)
    except Exception:
        log.exception("launch.failed", attempt=starting.attempt.attempt_id)


async def _repeat(
    core: Core, name: str, turn: Callable[[], Awaitable[None]], pause: Callable[[], Awaitable[None]]
) -> None:
    while True:
        await _turn(core, name, turn)
        await pause()


async def _turn(core: Core, name: str, turn: Callable[[], Awaitable[T]]) -> T | None:
    try:
        done = await turn()
    except StoreUnavailable as error:
        log.warning("loop.store_unavailable", loop=name, error=error.message)
        core.turns.failed(name, error)
    except Exception as error:
        log.exception("loop.failed", loop=name)
        core.turns.failed(name, error)
    else:
        core.turns.went_well(name)
        return done
    await anyio.sleep(FAILED_PAUSE_S)
    return None
