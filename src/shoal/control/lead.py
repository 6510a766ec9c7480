"""Keep the lead, and know who else could have it.

The store refuses everything once another leads; this finds out within a second, also when there is nothing to
write, and keeps the session from being taken for a dead one's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread
import structlog

from shoal.control.core import Core
from shoal.errors import StoreUnavailable
from shoal.settings import Settings
from shoal.store import Standby, Tx
from shoal.store.threaded import ThreadedStore

LOOK_EVERY_S = 1.0
CONFIRM_S = 4.0
"""Answers from memory count for so long after the database confirmed the lead; another may lead since."""
MEET_EVERY_S = 5.0

log = structlog.get_logger()


@asynccontextmanager
async def keeping_lead(core: Core, store: ThreadedStore) -> AsyncIterator[None]:
    """For as long as the block lasts. `core.deposed` is set as soon as another is known to lead."""
    core.term = store.term
    core.lead_confirmed_at = core.clock.monotonic()
    if not core.term:
        yield
        return
    loop = asyncio.get_running_loop()

    def on_deposed() -> None:
        loop.call_soon_threadsafe(core.deposed.set)

    store.on_deposed(on_deposed)
    roster = Standby(core.settings.store_url)
    log.info("control.leads", term=core.term, url=core.settings.url)
    try:
        await meet(core, roster)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_look, core)
            tasks.start_soon(_keep_meeting, core, roster)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()
    finally:
        roster.close()


async def meet(core: Core, roster: Standby) -> None:
    """Tell the other control planes of this one, and learn of them. One that cannot now does so later."""
    try:
        known = await anyio.to_thread.run_sync(roster.meet, core.settings.url_for_supervisors)
    except StoreUnavailable as error:
        log.warning("control.meets_nobody", error=error.message)
        return
    core.control_urls = urls_for_supervisors(core.settings, known)


def urls_for_supervisors(settings: Settings, known: tuple[str, ...] = ()) -> tuple[str, ...]:
    """This control plane first, then those that are `known`, then those that were named to it."""
    named = settings.nodes_urls if settings.has_other_machines else ()
    return tuple(dict.fromkeys((settings.url_for_supervisors, *known, *named)))


async def _keep_meeting(core: Core, roster: Standby) -> None:
    while True:
        await anyio.sleep(MEET_EVERY_S)
        await meet(core, roster)


def check_lead(core: Core) -> None:
    """`StoreUnavailable` if the database has not confirmed the lead for `CONFIRM_S`.

    For answers that come from memory: every transaction compares the term by itself.
    """
    silent_s = core.clock.monotonic() - core.lead_confirmed_at
    if core.term and (core.deposed.is_set() or silent_s > CONFIRM_S):
        raise StoreUnavailable(
            f"the database has not confirmed for {silent_s:.0f} s that this control plane leads",
            hint="ask again in a few seconds, or ask the other control plane",
        )


async def _look(core: Core) -> None:
    while True:
        asked_at = core.clock.monotonic()
        try:
            await core.store.write(_nothing)
            core.lead_confirmed_at = asked_at
        except StoreUnavailable as error:
            log.warning("control.lead_not_seen", error=error.message)
        await anyio.sleep(LOOK_EVERY_S)


def _nothing(tx: Tx) -> None:
    """To begin a transaction is to see that the lead is ours."""
