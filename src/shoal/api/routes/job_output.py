"""A job's output: its logs, its metrics and its checkpoints.

Logs come a page at a time, or as they are written. Metrics are curves of what ranks log and of what nodes
measure. Checkpoints are listed as the job's directory shows them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import Query, Request, Response

from shoal.api.call import call_of, json_response
from shoal.api.http.sse import EventStream
from shoal.api.log_follower import LogFollowRequest, follow
from shoal.api.log_pages import LogFilter, LogPosition, parse_position, read_page, read_tail
from shoal.api.queries import CheckpointsQuery, LogQuery, MetricsQuery
from shoal.api.routes.jobs import load_job
from shoal.api.routing import RouteGroup
from shoal.api.views import schema
from shoal.api.views.render import render_job
from shoal.control.job_specs import spec_of
from shoal.curve import Point, thin_points
from shoal.engines.base import (
    SavedCheckpoint,
    SavedCheckpoints,
    SaveDecision,
    SavedState,
    SupportsCheckpoints,
)
from shoal.errors import NotFound, SpecError
from shoal.identity import Permission
from shoal.model.attempt import Attempt, AttemptState
from shoal.store import MetricSeries, Tx

log_routes = RouteGroup("logs")


@log_routes.add("GET", "/v1/jobs/{job_id}/logs", Permission.JOB_READ, answers=schema.LogPageView)
async def read_logs(request: Request, job_id: str, query: Annotated[LogQuery, Query()]) -> Response:
    """Lines of one attempt, oldest first."""
    call = call_of(request)
    job, attempts = await load_job(call, job_id)
    call.allow(job.project, job_id=job.job_id)
    position = _position(query, query.cursor)
    epoch = position.epoch if position else query.attempt
    attempt = _attempt(attempts, epoch)
    engine = call.core.link.engine
    if query.tail is not None:
        page = await read_tail(engine, attempt, _wanted(query), query.tail)
    else:
        begin = position or LogPosition(attempt.epoch)
        page = await read_page(engine, attempt, begin, query.limit, _wanted(query))
    is_complete = page.is_complete and attempt.state is AttemptState.ENDED
    view: schema.LogPageView = {
        "items": [line.view for line in page.lines],
        "next_cursor": None if is_complete else str(page.position),
        "is_complete": is_complete,
    }
    return json_response(view)


@log_routes.add(
    "GET", "/v1/jobs/{job_id}/logs/stream", Permission.JOB_READ, answers=None, media_type="text/event-stream"
)
async def stream_logs(request: Request, job_id: str, query: Annotated[LogQuery, Query()]) -> Response:
    """Lines as they are written, over all attempts from the chosen attempt, until the job has ended."""
    call = call_of(request)
    job, attempts = await load_job(call, job_id)
    call.allow(job.project, job_id=job.job_id)
    last_id = request.headers.get("last-event-id")
    position = _position(query, last_id or query.cursor)
    if position is None and query.attempt is not None:
        position = LogPosition(_attempt(attempts, query.attempt).epoch)
    if position is not None:
        position.offsets_for(_attempt(attempts, position.epoch))
    tail = None if last_id else query.tail
    wanted = LogFollowRequest(job_id, position, last_id is not None, _wanted(query), tail)
    return EventStream(call, follow(call, wanted))


def _wanted(query: LogQuery) -> LogFilter:
    return LogFilter(query.rank, query.stacks)


def _position(query: LogQuery, cursor: str | None) -> LogPosition | None:
    if cursor is None:
        return None
    if query.tail is not None and query.cursor is not None:
        raise SpecError("`tail` and `cursor` exclude each other", hint="drop one of them")
    return parse_position(cursor)


def _attempt(attempts: list[Attempt], epoch: int | None) -> Attempt:
    """The attempt with this epoch; the newest for None."""
    for attempt in reversed(attempts):
        if epoch is None or attempt.epoch == epoch:
            return attempt
    raise NotFound(f"the job has no attempt {epoch}", hint="attempts are counted from 1")


metric_routes = RouteGroup("metrics")


@metric_routes.add("GET", "/v1/jobs/{job_id}/metrics", Permission.JOB_READ, answers=schema.MetricsView)
async def read_metrics(request: Request, job_id: str, query: Annotated[MetricsQuery, Query()]) -> Response:
    """Every curve of a job, or those with these names, by name and node."""
    call = call_of(request)
    job, attempts = await load_job(call, job_id)
    call.allow(job.project, job_id=job.job_id)
    wanted = frozenset(query.name)

    def read(tx: Tx) -> list[schema.MetricView]:
        # Rendered here, on a reader's thread: there may be hundreds of thousands of points.
        series = [curve for curve in tx.metrics.series(job.job_id) if not wanted or curve.name in wanted]
        return [_render_curve(curve, tx.metrics.points(job.job_id, curve), query.points) for curve in series]

    curves = await call.core.records.store.read(read)
    shown = render_job(job, attempts[-1])
    view: schema.MetricsView = {
        "ref": shown["ref"],
        "name": shown["name"],
        "status": shown["status"],
        "items": curves,
    }
    return json_response(view)


def _render_curve(curve: MetricSeries, points: list[Point], most: int) -> schema.MetricView:
    lows = [point.low for point in points if point.low is not None]
    highs = [point.high for point in points if point.high is not None]
    return {
        "name": curve.name,
        "node": curve.node or None,
        "axis": curve.axis.value,
        "rank": curve.rank,
        "heard_at": curve.heard_at,
        "low": min(lows, default=None),
        "high": max(highs, default=None),
        "newest": curve.newest or (points[-1].x, points[-1].last),
        "points": [(point.x, point.last, point.low, point.high) for point in thin_points(points, most)],
    }


checkpoint_routes = RouteGroup("checkpoints")

VERIFY_S = 20.0
"""About 20 to 40 GB on a fast disk. The rest stays unverified, and the reply shows that."""
IN_MEMORY = "memory"
"""A checkpoint in memory. It is gone with the job's processes."""
USABLE = (SavedState.COMPLETE, SavedState.VERIFIED)


@checkpoint_routes.add(
    "GET", "/v1/jobs/{job_id}/checkpoints", Permission.JOB_READ, answers=schema.CheckpointsView
)
async def list_checkpoints(
    request: Request, job_id: str, query: Annotated[CheckpointsQuery, Query()]
) -> Response:
    """A job's checkpoints, the newest first, how often it saves, and what else is in its directory."""
    call = call_of(request)
    job, attempts = await load_job(call, job_id)
    call.allow(job.project, job_id=job.job_id)
    engine, checkpoints = call.core.link.engine, SavedCheckpoints()
    if isinstance(engine, SupportsCheckpoints):
        checkpoints = await engine.inspect_checkpoints(job.job_id, VERIFY_S if query.verify else 0.0)
    shown = render_job(job, attempts[-1])
    following = next((checkpoint for checkpoint in checkpoints.items if checkpoint.state in USABLE), None)
    view: schema.CheckpointsView = {
        "ref": shown["ref"],
        "name": shown["name"],
        "status": shown["status"],
        "has_directory": spec_of(job).checkpoint is not None,
        "items": [
            _render_checkpoint(checkpoint, is_next=checkpoint is following, is_open=job.outcome is None)
            for checkpoint in checkpoints.items
        ],
        "decision": None if checkpoints.decision is None else _render_decision(checkpoints.decision),
        "program_saves": [
            {
                "name": save.name,
                "saved_at": save.saved_at,
                "size_bytes": save.size_bytes,
                "problem": save.problem,
            }
            for save in checkpoints.program_saves
        ],
        "num_program_saves": checkpoints.num_program_saves,
        "has_more_program_saves": checkpoints.is_truncated,
    }
    return json_response(view)


def _render_checkpoint(checkpoint: SavedCheckpoint, *, is_next: bool, is_open: bool) -> schema.CheckpointView:
    return {
        "step": checkpoint.step,
        "epoch": checkpoint.epoch,
        "rendezvous_round": checkpoint.rendezvous_round,
        "saved_at": checkpoint.saved_at,
        "size_bytes": checkpoint.size_bytes,
        "world_size": checkpoint.world_size,
        "places": [place for place in checkpoint.locations if is_open or place != IN_MEMORY],
        "state": checkpoint.state.value,
        "problem": checkpoint.problem,
        "is_next": is_next,
    }


def _render_decision(decision: SaveDecision) -> schema.SaveDecisionView:
    return msgspec.convert(msgspec.to_builtins(decision), schema.SaveDecisionView)
