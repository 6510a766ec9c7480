"""What data planes read and say: the table of what is served, and what they count."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from fastapi import Query, Request, Response

from shoal.api.bodies import decode_strictly, read_raw_json
from shoal.api.call import answer, call_of
from shoal.api.queries import NoQuery, TableQuery
from shoal.api.requests import ReportBody
from shoal.api.routing import Routes
from shoal.api.service_views import ReportedView, TableView
from shoal.control.lead import check_lead
from shoal.errors import SpecError
from shoal.identity import Permission
from shoal.serving.table import Report

routes = Routes("serving")
UNCHANGED = 304
KNOWN = re.compile(r'(?:W/)?"(?:([0-9a-f]{1,32})-)?([0-9]{1,18})"')
"""An epoch and a version in it as an entity tag."""


@routes.add("GET", "/v1/serving/table", Permission.TABLE_READ, answers=TableView)
async def read_table(request: Request, query: Annotated[TableQuery, Query()]) -> Response:
    """The whole table, as soon as it is newer than the one that the asker has; 304 if it is not in time."""
    call = call_of(request)
    known = KNOWN.fullmatch(request.headers.get("if-none-match", ""))
    after = max(query.after, int(known[2]) if known else 0)
    epoch = (known[1] if known else None) or ""
    table = await call.plane.core.services.newer(after, query.wait_s, epoch)
    check_lead(call.plane.core)  # a leader that another has followed must not confirm its own table
    if table is None:
        return Response(status_code=UNCHANGED)
    tag = {"etag": f'"{table.epoch}-{table.version}"'}
    return Response(msgspec.json.encode(table), media_type="application/json", headers=tag)


@routes.add("POST", "/v1/serving/reports", Permission.TABLE_REPORT, answers=ReportedView, body=ReportBody)
async def take_report(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """What one process of a data plane counts, once a second."""
    call = call_of(request)
    try:
        report = msgspec.convert(decode_strictly(await read_raw_json(request)), Report)
    except msgspec.ValidationError as error:
        raise SpecError(f"not a report: {error}") from error
    call.plane.core.services.heard(report, call.plane.core.clock.monotonic())
    view: ReportedView = {"version": call.plane.core.services.table.version}
    return answer(view)
