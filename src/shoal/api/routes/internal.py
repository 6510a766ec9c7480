"""Routes for parts of Shoal: supervisors renew their leases, and a job reads its own record.

Supervisors on other machines fetch a task spec with a bootstrap token, then send logs and the outcome,
signed. Data planes read the serving table and report their counts.
"""

from __future__ import annotations

import hashlib
import re
from typing import Annotated

import msgspec
from fastapi import Query, Request, Response
from starlette.responses import FileResponse

from shoal.api.call import Call, call_of, json_response
from shoal.api.http.bodies import decode_strictly, read_raw, read_raw_json
from shoal.api.queries import NoQuery, TableQuery
from shoal.api.requests import RenewalBody, ReportBody, TaskSpecRequestBody
from shoal.api.routes.jobs import load_job
from shoal.api.routing import RouteGroup
from shoal.api.views import schema
from shoal.api.views.render import render_attempt, render_job
from shoal.api.views.services import ReportedView, TableView
from shoal.control import StaleRenewal
from shoal.control.commands import mailbox, renewals
from shoal.control.loops.leadership import check_leadership
from shoal.errors import Denied, SpecError, Unauthenticated
from shoal.identity import Permission, proof_key
from shoal.proof import prove
from shoal.serving.table import ServingReport
from shoal.wire import Renewal, RenewalReply, StatusReport, TaskSpecRequest

supervisor_routes = RouteGroup("supervisor")


@supervisor_routes.add(
    "POST", "/v1/supervisor/renew", Permission.LEASE_RENEW, answers=schema.RenewalReplyView, body=RenewalBody
)
async def renew_lease(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """A supervisor's heartbeat, for its own attempt on its own node.

    A stale supervisor learns it from a proven reply: any process on this port could send a refusal.
    """
    call = call_of(request)
    body = await read_raw_json(request)
    if hashlib.sha256(body).hexdigest() != call.caller.body_digest:
        raise Denied("this renewal is not the one that its supervisor signed")
    try:
        renewal = msgspec.convert(decode_strictly(body), Renewal)
    except msgspec.ValidationError as error:
        raise SpecError(f"not a renewal: {error}") from error
    if (renewal.attempt_id, renewal.node) != (call.caller.attempt_id, call.caller.node):
        raise Denied("this token renews the lease of another attempt or node")
    try:
        reply = await renewals.renew(call.core.upkeep, call.core.inputs, call.core.services, renewal)
    except StaleRenewal as error:
        reply = RenewalReply(is_stale=True, should_stop=True, grace_s=0.0, because=error.message)
    reply = prove(proof_key(call.core.sealing.key, renewal.attempt_id, renewal.node), renewal, reply)
    view: schema.RenewalReplyView = {
        "should_stop": reply.should_stop,
        "grace_s": reply.grace_s,
        "because": reply.because,
        "is_stale": reply.is_stale,
        "rendezvous_round": reply.rendezvous_round,
        "master_port": reply.master_port,
        "is_after_hang": reply.is_after_hang,
        "drill": None if reply.drill is None else msgspec.to_builtins(reply.drill),
        "should_sleep": reply.should_sleep,
        "control_urls": list(reply.control_urls),
        "proof": reply.proof,
    }
    return json_response(view)


@supervisor_routes.add("GET", "/v1/self", Permission.JOB_SELF, answers=schema.SelfView)
async def show_self(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """The job whose token this is."""
    call = call_of(request)
    assert call.caller.job_id is not None
    job, attempts = await load_job(call, call.caller.job_id)
    mine = next((a for a in attempts if a.attempt_id == call.caller.attempt_id), None)
    if mine is None:
        raise Unauthenticated("this job's attempt has ended")
    shown = render_attempt(mine, call.core.running.worlds.of(mine))
    view: schema.SelfView = {"job": render_job(job, attempts[-1]), "attempt": shown}
    return json_response(view)


mailbox_routes = RouteGroup("mailbox")
TAR = "application/x-tar"
BYTES = "application/octet-stream"


@mailbox_routes.add(
    "POST",
    "/v1/mailbox/fetch",
    Permission.TASK_SPEC_FETCH,
    answers=schema.TaskAssignmentView,
    body=TaskSpecRequestBody,
)
async def fetch_task_spec(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """The spec of one task, for the first process that asks for it, once the task may begin."""
    call = call_of(request)
    assignment = await mailbox.assign_task(
        call.core.upkeep, call.core.inputs, call.core.services, await _read_task_spec_request(call, request)
    )
    return Response(msgspec.json.encode(assignment), media_type="application/json")


@mailbox_routes.add(
    "POST",
    "/v1/mailbox/archive",
    Permission.TASK_SPEC_FETCH,
    answers=None,
    body=TaskSpecRequestBody,
    media_type=TAR,
)
async def fetch_archive(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """The snapshot of the working directory of a task, for the process that has the task's spec."""
    call = call_of(request)
    return FileResponse(
        await mailbox.archive_for(
            call.core.records.store,
            call.core.link.engine,
            call.core.leadership,
            await _read_task_spec_request(call, request),
        ),
        media_type=TAR,
    )


@mailbox_routes.add("POST", "/v1/mailbox/dispatch", Permission.LOG_SHIP, answers=schema.StatusReplyView)
async def take_status_report(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """A node agent's report on its task: a line of JSON (`shoal.wire.StatusReport`), then bytes
    of its log.
    """
    call = call_of(request)
    body = await read_raw(request, BYTES)
    if hashlib.sha256(body).hexdigest() != call.caller.body_digest:
        raise Denied("this status report is not the one that its node agent signed")
    head, _, piece = body.partition(b"\n")
    try:
        report = msgspec.convert(decode_strictly(head), StatusReport)
    except msgspec.ValidationError as error:
        raise SpecError(f"not a status report: {error}") from error
    if (report.attempt_id, report.node) != (call.caller.attempt_id, call.caller.node):
        raise Denied("this token is for another attempt or node")
    reply = await mailbox.receive_report(
        call.core.records.store, call.core.link.engine, call.core.leadership, report, piece
    )
    view: schema.StatusReplyView = {
        "size": reply.size,
        "stop_grace_s": reply.stop_grace_s,
        "is_recorded": reply.is_recorded,
        "control_urls": list(reply.control_urls),
    }
    return json_response(view)


async def _read_task_spec_request(call: Call, request: Request) -> TaskSpecRequest:
    try:
        task_spec_request = msgspec.convert(decode_strictly(await read_raw_json(request)), TaskSpecRequest)
    except msgspec.ValidationError as error:
        raise SpecError(f"not a task spec request: {error}") from error
    if task_spec_request.attempt_id != call.caller.attempt_id:
        raise Denied("this bootstrap token is for another attempt")
    return task_spec_request


serving_routes = RouteGroup("serving")
UNCHANGED = 304
TABLE_TAG = re.compile(r'(?:W/)?"(?:([0-9a-f]{1,32})-)?([0-9]{1,18})"')
"""An epoch and a version of the table, as an entity tag."""


@serving_routes.add("GET", "/v1/serving/table", Permission.TABLE_READ, answers=TableView)
async def read_table(request: Request, query: Annotated[TableQuery, Query()]) -> Response:
    """The whole table, as soon as it is newer than the caller's; 304 if there is no newer one in time."""
    call = call_of(request)
    tag_match = TABLE_TAG.fullmatch(request.headers.get("if-none-match", ""))
    after = max(query.after, int(tag_match[2]) if tag_match else 0)
    epoch = (tag_match[1] if tag_match else None) or ""
    table = await call.core.services.wait_for_newer(after, query.wait_s, epoch)
    # A deposed leader must not confirm its own table.
    check_leadership(call.core.records.clock, call.core.leadership)
    if table is None:
        return Response(status_code=UNCHANGED)
    tag = {"etag": f'"{table.epoch}-{table.version}"'}
    return Response(msgspec.json.encode(table), media_type="application/json", headers=tag)


@serving_routes.add(
    "POST", "/v1/serving/reports", Permission.TABLE_REPORT, answers=ReportedView, body=ReportBody
)
async def take_report(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """The counts of one data plane process, once a second."""
    call = call_of(request)
    try:
        report = msgspec.convert(decode_strictly(await read_raw_json(request)), ServingReport)
    except msgspec.ValidationError as error:
        raise SpecError(f"not a serving report: {error}") from error
    call.core.services.note_report(report, call.core.records.clock.monotonic())
    view: ReportedView = {"version": call.core.services.table.version}
    return json_response(view)
