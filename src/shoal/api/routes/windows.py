"""Maintenance windows and reservations."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request, Response

from shoal.api import views
from shoal.api.bodies import read_model
from shoal.api.call import Call, answer, call_of, idempotency_key
from shoal.api.queries import NoQuery
from shoal.api.render import render_window
from shoal.api.requests import NewWindow
from shoal.api.routing import Routes
from shoal.control.windows import AskedWindow, all_still_there
from shoal.identity import Permission
from shoal.model.window import Window, WindowKind
from shoal.store import Tx

routes = Routes("windows")


@routes.add("GET", "/v1/windows", Permission.NODE_READ, answers=views.WindowPageView)
async def list_windows(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """Maintenance and reservations that are not over, the first to begin first."""
    call = call_of(request)
    now = call.plane.core.clock.now()
    found = await call.plane.core.store.read(lambda tx: tx.windows.open(now))
    view: views.WindowPageView = {"items": await _views(call, found), "next_cursor": None}
    return answer(view)


@routes.add(
    "POST", "/v1/windows", Permission.NODE_MANAGE, answers=views.WindowView, status=201, body=NewWindow
)
async def declare_window(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """Keep nodes for nobody or for one project. Who may be in its way does not start; what runs runs on."""
    call = call_of(request)
    key = idempotency_key(request)
    body = await read_model(request, NewWindow, max_bytes=call.plane.settings.limits.max_body_bytes)
    asked = AskedWindow(
        kind=WindowKind(body.kind),
        nodes=tuple(body.nodes),
        count=body.count,
        pool=body.pool,
        from_at=body.from_at,
        duration_s=body.duration_s,
        project=body.project,
        because=body.because,
    )
    window = await call.plane.declare_window(call.actor, asked, key=key)
    return answer((await _views(call, [window]))[0], 201)


@routes.add("DELETE", "/v1/windows/{window_id}", Permission.NODE_MANAGE, answers=views.WindowView)
async def cancel_window(request: Request, window_id: str, query: Annotated[NoQuery, Query()]) -> Response:
    """The nodes are everybody's again."""
    call = call_of(request)
    window = await call.plane.cancel_window(call.actor, window_id, key=idempotency_key(request))
    return answer((await _views(call, [window]))[0])


async def _views(call: Call, windows: list[Window]) -> list[views.WindowView]:
    core, visible = call.plane.core, call.visible()
    now = core.clock.now()
    if not windows:
        return []

    def look(tx: Tx) -> list[views.WindowView]:
        # In the reader's thread: with many windows and jobs it takes longer than the loop may stand still.
        holding, projects = tx.attempts.holding(), tx.people.projects()
        there = all_still_there(windows, holding, projects, now)
        return [
            render_window(window, [job for job, _ in found], visible)
            for window, found in zip(windows, there, strict=True)
        ]

    return await core.store.read(look)
