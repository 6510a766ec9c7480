"""Keep the lead, and know the other control planes that could have it.

The store refuses every write once another control plane leads. This loop notices that within a second, even
if there is nothing to write. It also keeps the database from taking the leader's session for a dead one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread
import structlog

from shoal.clock import Clock
from shoal.control.capabilities import Leadership, Records
from shoal.errors import StoreUnavailable
from shoal.settings import Settings
from shoal.store import LeadershipWatch, Tx
from shoal.store.threaded import ThreadedStore

CONFIRM_EVERY_S = 1.0
CONFIRM_S = 4.0
"""How long replies from memory are valid after the database confirmed the lead. After that another control
plane may lead.
"""
EXCHANGE_EVERY_S = 5.0

log = structlog.get_logger()


@asynccontextmanager
async def keep_leadership(
    records: Records, leadership: Leadership, settings: Settings, store: ThreadedStore
) -> AsyncIterator[None]:
    """Keep the lead while the block lasts. Sets `core.deposed` as soon as another control plane is known to
    lead.
    """
    leadership.term = store.term
    leadership.confirmed_at = records.clock.monotonic()
    if not leadership.term:
        yield
        return
    loop = asyncio.get_running_loop()

    def on_deposed() -> None:
        loop.call_soon_threadsafe(leadership.deposed.set)

    store.on_deposed(on_deposed)
    roster = LeadershipWatch(settings.store_url)
    log.info("control.leads", term=leadership.term, url=settings.url)
    try:
        await exchange_urls(leadership, settings, roster)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_keep_confirming, records, leadership)
            tasks.start_soon(_keep_exchanging_urls, leadership, settings, roster)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()
    finally:
        roster.close()


async def exchange_urls(leadership: Leadership, settings: Settings, roster: LeadershipWatch) -> None:
    """Announce this control plane to the others, and learn of them. If that fails now, it happens later."""
    try:
        other_urls = await anyio.to_thread.run_sync(roster.announce, settings.url_for_supervisors)
    except StoreUnavailable as error:
        log.warning("control.urls_not_exchanged", error=error.message)
        return
    leadership.control_urls = urls_for_supervisors(settings, other_urls)


def urls_for_supervisors(settings: Settings, other_urls: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the URL of this control plane first, then `other_urls`, then those of the settings."""
    named = settings.nodes_urls if settings.has_other_machines else ()
    return tuple(dict.fromkeys((settings.url_for_supervisors, *other_urls, *named)))


async def _keep_exchanging_urls(leadership: Leadership, settings: Settings, roster: LeadershipWatch) -> None:
    while True:
        await anyio.sleep(EXCHANGE_EVERY_S)
        await exchange_urls(leadership, settings, roster)


def check_leadership(clock: Clock, leadership: Leadership) -> None:
    """Raise `StoreUnavailable` if the database has not confirmed the lead for `CONFIRM_S`.

    For replies from memory. Every transaction compares the term by itself.
    """
    silent_s = clock.monotonic() - leadership.confirmed_at
    if leadership.term and (leadership.deposed.is_set() or silent_s > CONFIRM_S):
        raise StoreUnavailable(
            f"the database has not confirmed for {silent_s:.0f} s that this control plane leads",
            hint="ask again in a few seconds, or ask the other control plane",
        )


async def _keep_confirming(records: Records, leadership: Leadership) -> None:
    while True:
        asked_at = records.clock.monotonic()
        try:
            await records.store.write(_empty_transaction)
            leadership.confirmed_at = asked_at
        except StoreUnavailable as error:
            log.warning("control.lead_not_confirmed", error=error.message)
        await anyio.sleep(CONFIRM_EVERY_S)


def _empty_transaction(tx: Tx) -> None:
    """Do nothing: a transaction that begins has confirmed the lead."""
