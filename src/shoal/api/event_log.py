"""Pages of the event log in short reads, so that no filter holds a reader thread for long."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from shoal.store import Event, EventFilter, Look, Store, Tx

MAX_LOOKS = 50
"""In one page: 100,000 entries. One that found less than it may hold has a cursor to go on from."""


async def next_events(store: Store, after: int, wanted: EventFilter, limit: int) -> Look:
    """The next matching entries after that one, oldest first, and how far the log was read."""
    found, is_done = list[Event](), False
    for _ in range(MAX_LOOKS):
        entries, after, is_done = await store.read(partial(_next, after, wanted, limit - len(found)))
        found += entries
        if is_done or len(found) == limit:
            break
    return Look(found, after, is_done)


async def latest_events(
    store: Store, wanted: EventFilter, count: int, is_gone: Callable[[], Awaitable[bool]]
) -> list[Event]:
    """The newest `count` matching entries, oldest first. Stops early once the client has gone."""
    before = (await store.read(lambda tx: tx.events.head())).seq + 1
    found, is_done = list[Event](), False
    while not is_done and len(found) < count and not await is_gone():
        entries, before, is_done = await store.read(partial(_before, before, wanted, count - len(found)))
        found += entries
    return found[::-1]


def _next(after: int, wanted: EventFilter, limit: int, tx: Tx) -> Look:
    return tx.events.look(after, wanted, limit)


def _before(before: int, wanted: EventFilter, limit: int, tx: Tx) -> Look:
    return tx.events.look_back(before, wanted, limit)
