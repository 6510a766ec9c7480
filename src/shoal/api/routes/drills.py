"""Drills: faults that a person asks for on a live job, and their reports."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request, Response

from shoal.api.call import call_of, idempotency_key, json_response
from shoal.api.http.bodies import read_model
from shoal.api.queries import DrillQuery, NoQuery
from shoal.api.requests import ClusterDrill, JobDrill
from shoal.api.routes.events import latest_events
from shoal.api.routes.jobs import load_job
from shoal.api.routing import RouteGroup
from shoal.api.views import cluster
from shoal.api.views.cluster import render_drill
from shoal.control.commands import drills as drill_commands
from shoal.control.commands.drills import DrillRecord, DrillRequest, drill_history
from shoal.errors import SpecError
from shoal.identity import Permission
from shoal.model.drill import DrillKind
from shoal.store import EventFilter

routes = RouteGroup("drills")


@routes.add("GET", "/v1/drills", Permission.EVENT_READ, answers=cluster.DrillPageView)
async def list_drills(request: Request, query: Annotated[DrillQuery, Query()]) -> Response:
    """The newest drills of the projects you may see, oldest of them first."""
    call = call_of(request)
    projects = call.visible()
    wanted = EventFilter(projects=projects, job_id=query.job, kinds_prefix="drill.")
    # Each drill has two events, and few drills are under way.
    store, count = call.core.records.store, 2 * query.limit + 2
    events = await latest_events(store, wanted, count, request.is_disconnected)
    drills = (await store.read(lambda tx: drill_history(tx, events)))[-query.limit :]
    view: cluster.DrillPageView = {"items": [render_drill(drill) for drill in drills], "next_cursor": None}
    return json_response(view)


@routes.add(
    "POST",
    "/v1/jobs/{job_id}/drills",
    Permission.JOB_DRILL,
    answers=cluster.DrillView,
    status=201,
    body=JobDrill,
)
async def drill_job(request: Request, job_id: str, query: Annotated[NoQuery, Query()]) -> Response:
    """Inject a fault into the ranks of a running job, and measure how the job continues."""
    call = call_of(request)
    key = idempotency_key(request)
    job, _ = await load_job(call, job_id)
    call.allow(job.project, is_own=job.owner == call.caller.id, job_id=job_id)
    body = await read_model(request, JobDrill)
    drill_request = DrillRequest(
        kind=DrillKind(body.kind),
        job_id=job_id,
        rank=body.rank,
        window_s=body.window_s,
        within_s=body.within_s,
        is_forced=body.is_forced,
    )
    drill = await drill_commands.start_drill(
        call.core.records, call.core.running, call.actor, drill_request, key=key
    )
    held = DrillRecord(drill=drill, project=job.project, ref=job.reference, result=None)
    return json_response(render_drill(held), 201)


@routes.add(
    "POST", "/v1/drills", Permission.NODE_DRILL, answers=cluster.DrillView, status=201, body=ClusterDrill
)
async def drill_cluster(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """Inject a fault into a node of a job, or announce that the control plane is about to be killed."""
    call = call_of(request)
    key = idempotency_key(request)
    body = await read_model(request, ClusterDrill)
    kind, job = DrillKind(body.kind), None
    if (kind is DrillKind.KILL_CONTROL) != (body.job_id is None):
        raise SpecError(f"a `{kind}` drill needs {'no' if body.job_id is not None else 'a'} job")
    if body.job_id is not None:
        job, _ = await load_job(call, body.job_id)
    drill_request = DrillRequest(
        kind=kind,
        job_id=body.job_id or "",
        node=body.node,
        for_s=body.for_s,
        window_s=body.window_s,
        within_s=body.within_s,
        is_forced=body.is_forced,
    )
    drill = await drill_commands.start_drill(
        call.core.records, call.core.running, call.actor, drill_request, key=key
    )
    held = DrillRecord(
        drill=drill,
        project=job.project if job is not None else None,
        ref=job.reference if job is not None else None,
        result=None,
    )
    return json_response(render_drill(held), 201)
