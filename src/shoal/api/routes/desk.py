"""For supervisors on other machines: the order by a ticket, then logs and the outcome, signed."""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec
from fastapi import Query, Request, Response
from starlette.responses import FileResponse

from shoal.api import views
from shoal.api.bodies import decode_strictly, read_raw, read_raw_json
from shoal.api.call import Call, answer, call_of
from shoal.api.queries import NoQuery
from shoal.api.requests import FetchBody
from shoal.api.routing import Routes
from shoal.errors import Denied, SpecError
from shoal.identity import Permission
from shoal.wire import Dispatch, Fetch

routes = Routes("desk")
TAR = "application/x-tar"
BYTES = "application/octet-stream"


@routes.add("POST", "/v1/desk/fetch", Permission.ORDER_FETCH, answers=views.AssignmentView, body=FetchBody)
async def fetch_order(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """The order of one share, for the first process that asks for it, once the share may begin."""
    call = call_of(request)
    assignment = await call.plane.fetch_order(await _asked(call, request))
    return Response(msgspec.json.encode(assignment), media_type="application/json")


@routes.add("POST", "/v1/desk/archive", Permission.ORDER_FETCH, answers=None, body=FetchBody, media_type=TAR)
async def fetch_archive(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """The snapshot of the working directory that goes with an order, for who has that order."""
    call = call_of(request)
    return FileResponse(await call.plane.archive_for(await _asked(call, request)), media_type=TAR)


@routes.add("POST", "/v1/desk/dispatch", Permission.LOG_SHIP, answers=views.DispatchedView)
async def take_dispatch(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """What the keeper of a share says: a line of JSON (`shoal.wire.Dispatch`), then bytes of its log."""
    call = call_of(request)
    body = await read_raw(request, BYTES)
    if hashlib.sha256(body).hexdigest() != call.caller.body_digest:
        raise Denied("this dispatch is not the one that its keeper signed")
    head, _, piece = body.partition(b"\n")
    try:
        told = msgspec.convert(decode_strictly(head), Dispatch)
    except msgspec.ValidationError as error:
        raise SpecError(f"not a dispatch: {error}") from error
    if (told.attempt_id, told.node) != (call.caller.attempt_id, call.caller.node):
        raise Denied("this token speaks for another attempt or node")
    heard = await call.plane.hear_keeper(told, piece)
    view: views.DispatchedView = {
        "size": heard.size,
        "stop_grace_s": heard.stop_grace_s,
        "is_recorded": heard.is_recorded,
        "control_urls": list(heard.control_urls),
    }
    return answer(view)


async def _asked(call: Call, request: Request) -> Fetch:
    try:
        asked = msgspec.convert(decode_strictly(await read_raw_json(request)), Fetch)
    except msgspec.ValidationError as error:
        raise SpecError(f"not a fetch: {error}") from error
    if asked.attempt_id != call.caller.attempt_id:
        raise Denied("this ticket is for another attempt")
    return asked
