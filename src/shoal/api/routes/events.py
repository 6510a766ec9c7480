"""Events: a page at a time or as they happen; and the audit, with its proof.

A page is read in several short reads, so that no filter holds a reader thread for long.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Annotated

from fastapi import Query, Request, Response

from shoal.api.call import Call, call_of, json_response
from shoal.api.http.sse import HEARTBEAT, HEARTBEAT_S, EventStream, event
from shoal.api.queries import AuditQuery, EventQuery, EventStreamQuery, NoQuery
from shoal.api.routing import RouteGroup
from shoal.api.views import schema
from shoal.api.views.cluster import VerifyView, render_verdict
from shoal.api.views.render import render_event
from shoal.control.commands import audit
from shoal.errors import SpecError
from shoal.identity import Permission
from shoal.store import Event, EventFilter, EventScan, Store, Tx

MAX_SCANS = 50
"""Scans per page: 100,000 entries. A page that is not full has a cursor to continue from."""


async def next_events(store: Store, after: int, wanted: EventFilter, limit: int) -> EventScan:
    """The next matching entries after that entry, oldest first, and how far the log was read."""
    events, is_done = list[Event](), False
    for _ in range(MAX_SCANS):
        entries, after, is_done = await store.read(partial(_next, after, wanted, limit - len(events)))
        events += entries
        if is_done or len(events) == limit:
            break
    return EventScan(events, after, is_done)


async def latest_events(
    store: Store, wanted: EventFilter, count: int, is_gone: Callable[[], Awaitable[bool]]
) -> list[Event]:
    """The newest `count` matching entries, oldest first. Stops early once the client has gone."""
    before = (await store.read(lambda tx: tx.events.head())).seq + 1
    events, is_done = list[Event](), False
    while not is_done and len(events) < count and not await is_gone():
        entries, before, is_done = await store.read(partial(_before, before, wanted, count - len(events)))
        events += entries
    return events[::-1]


def _next(after: int, wanted: EventFilter, limit: int, tx: Tx) -> EventScan:
    return tx.events.scan(after, wanted, limit)


def _before(before: int, wanted: EventFilter, limit: int, tx: Tx) -> EventScan:
    return tx.events.scan_back(before, wanted, limit)


BATCH = 500
routes = RouteGroup("events")


@routes.add("GET", "/v1/events", Permission.EVENT_READ, answers=schema.EventPageView)
async def list_events(request: Request, query: Annotated[EventQuery, Query()]) -> Response:
    """Events of the projects you may see, oldest first: after the one with number `after`, or the newest
    `tail`.
    """
    call = call_of(request)
    return json_response(await _read(call, request, query, await _filter(call, query)))


@routes.add("GET", "/v1/events/stream", Permission.EVENT_READ, answers=None, media_type="text/event-stream")
async def stream_events(request: Request, query: Annotated[EventStreamQuery, Query()]) -> Response:
    """Events as they are recorded. `Last-Event-ID` or `after` continues where a reader was."""
    call = call_of(request)
    wanted = await _filter(call, query)
    after = query.after
    last_id = request.headers.get("last-event-id")
    if last_id is not None:
        if not (last_id.isascii() and last_id.isdigit() and len(last_id) < 19):
            raise SpecError("Last-Event-ID is the number of an event", hint="leave it out to begin now")
        after = int(last_id)
    if after is None:
        after = (await call.core.records.store.read(lambda tx: tx.events.head())).seq
    return EventStream(call, _events(call, wanted, after))


async def _events(call: Call, wanted: EventFilter, after: int) -> AsyncIterator[bytes]:
    core = call.core
    quiet_since = core.records.clock.monotonic()
    yield HEARTBEAT
    while True:
        page, after, is_done = await core.records.store.read(partial(_after, after, wanted))
        if page:
            yield b"".join(event("event", item, item["seq"]) for item in page)
        if is_done:
            await call.core.signals.commits.wait(1.0)
        now = core.records.clock.monotonic()
        if now - quiet_since > HEARTBEAT_S:
            quiet_since = now
            yield HEARTBEAT


def _after(seq: int, wanted: EventFilter, tx: Tx) -> tuple[list[schema.EventView], int, bool]:
    entries, reached, is_done = tx.events.scan(seq, wanted, BATCH)
    return _rendered(entries, tx), reached, is_done


def _rendered(page: list[Event], tx: Tx) -> list[schema.EventView]:
    refs = tx.jobs.references(item.job_id for item in page if item.job_id)
    return [render_event(item, refs) for item in page]


@routes.add("GET", "/v1/audit", Permission.AUDIT_READ, answers=schema.EventPageView)
async def list_audit(request: Request, query: Annotated[AuditQuery, Query()]) -> Response:
    """What people and their tokens did, and what callers were refused. `tail` as for events."""
    call = call_of(request)
    await audit.write_refusals(call.core.records, call.core.refusals, is_all=True)
    return json_response(await _read(call, request, query, EventFilter(without_ours=True)))


@routes.add("GET", "/v1/audit/verify", Permission.AUDIT_READ, answers=VerifyView)
async def verify_audit(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """Recompute the whole chain, and compare users, roles, projects, tokens and the policy with the log."""
    call = call_of(request)
    return json_response(render_verdict(await audit.verify_audit(call.core.anchors, call.core.records.store)))


async def _filter(call: Call, query: EventQuery | EventStreamQuery) -> EventFilter:
    projects = await call.visible_in(query.project)
    return EventFilter(
        projects=projects,
        job_id=query.job,
        service=query.service,
        node=query.node,
        kinds_prefix=query.kind,
    )


async def _read(
    call: Call, request: Request, query: EventQuery | AuditQuery, wanted: EventFilter
) -> schema.EventPageView:
    store, tail = call.core.records.store, query.tail
    if tail is not None:
        if query.after is not None:
            raise SpecError("`tail` and `after` exclude each other", hint="drop one of them")
        newest = await latest_events(store, wanted, tail, request.is_disconnected)
        return {"items": await store.read(partial(_rendered, newest)), "next_cursor": None}
    entries, reached, is_done = await next_events(store, query.after or 0, wanted, query.limit)
    items = await store.read(partial(_rendered, entries))
    return {"items": items, "next_cursor": None if is_done else str(reached)}
