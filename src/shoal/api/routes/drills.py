"""Drills: faults that somebody asks for, on a live job, and what came of them."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request, Response

from shoal.api import drill_views
from shoal.api.bodies import read_model
from shoal.api.call import answer, call_of, idempotency_key
from shoal.api.event_log import latest_events
from shoal.api.queries import DrillQuery, NoQuery
from shoal.api.render_drill import render_drill
from shoal.api.requests import ClusterDrill, JobDrill
from shoal.api.routes.jobs import load_job
from shoal.api.routing import Routes
from shoal.control.drills import AskedDrill, Held, history
from shoal.errors import SpecError
from shoal.identity import Permission
from shoal.model.drill import DrillKind
from shoal.store import EventFilter

routes = Routes("drills")


@routes.add("GET", "/v1/drills", Permission.EVENT_READ, answers=drill_views.DrillPageView)
async def list_drills(request: Request, query: Annotated[DrillQuery, Query()]) -> Response:
    """The newest drills of the projects you may see, oldest of them first."""
    call = call_of(request)
    projects = call.visible()
    wanted = EventFilter(projects=projects, job_id=query.job, kinds_prefix="drill.")
    # Each has two events, and those of drills under way are few.
    store, count = call.plane.core.store, 2 * query.limit + 2
    events = await latest_events(store, wanted, count, request.is_disconnected)
    found = (await store.read(lambda tx: history(tx, events)))[-query.limit :]
    view: drill_views.DrillPageView = {"items": [render_drill(one) for one in found], "next_cursor": None}
    return answer(view)


@routes.add(
    "POST",
    "/v1/jobs/{job_id}/drills",
    Permission.JOB_DRILL,
    answers=drill_views.DrillView,
    status=201,
    body=JobDrill,
)
async def drill_job(request: Request, job_id: str, query: Annotated[NoQuery, Query()]) -> Response:
    """Do something to the ranks of a job that runs, and measure how it goes on."""
    call = call_of(request)
    key = idempotency_key(request)
    job, _ = await load_job(call, job_id)
    call.allow(job.project, is_own=job.owner == call.caller.id, job_id=job_id)
    body = await read_model(request, JobDrill)
    asked = AskedDrill(
        kind=DrillKind(body.kind),
        job_id=job_id,
        rank=body.rank,
        window_s=body.window_s,
        within_s=body.within_s,
        is_forced=body.is_forced,
    )
    drill = await call.plane.start_drill(call.actor, asked, key=key)
    held = Held(drill=drill, project=job.project, ref=job.reference, result=None)
    return answer(render_drill(held), 201)


@routes.add(
    "POST", "/v1/drills", Permission.NODE_DRILL, answers=drill_views.DrillView, status=201, body=ClusterDrill
)
async def drill_cluster(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """Do something to a node of a job, or announce that the control plane is about to be killed."""
    call = call_of(request)
    key = idempotency_key(request)
    body = await read_model(request, ClusterDrill)
    kind, job = DrillKind(body.kind), None
    if (kind is DrillKind.KILL_CONTROL) != (body.job_id is None):
        raise SpecError(f"`{kind}` is of {'no' if body.job_id is not None else 'a'} job")
    if body.job_id is not None:
        job, _ = await load_job(call, body.job_id)
    asked = AskedDrill(
        kind=kind,
        job_id=body.job_id or "",
        node=body.node,
        for_s=body.for_s,
        window_s=body.window_s,
        within_s=body.within_s,
        is_forced=body.is_forced,
    )
    drill = await call.plane.start_drill(call.actor, asked, key=key)
    held = Held(
        drill=drill,
        project=job.project if job is not None else None,
        ref=job.reference if job is not None else None,
        result=None,
    )
    return answer(render_drill(held), 201)
