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
MEET_EVERY_S = 5.0

log = structlog.get_logger()


@asynccontextmanager
async def keeping_lead(core: Core, store: ThreadedStore) -> AsyncIterator[None]:
    """For as long as the block lasts. `core.deposed` is set as soon as another is known to lead."""
    core.term = store.term
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


async def _look(core: Core) -> None:
    while True:
        try:
            await core.store.write(_nothing)
        except StoreUnavailable as error:
            log.warning("control.lead_not_seen", error=error.message)
        await anyio.sleep(LOOK_EVERY_S)


def _nothing(tx: Tx) -> None:
    """To begin a transaction is to see that the lead is ours."""
