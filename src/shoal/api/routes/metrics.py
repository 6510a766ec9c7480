"""What a job measures: curves of what its ranks log and of what its nodes see."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request, Response

from shoal.api import views
from shoal.api.call import answer, call_of
from shoal.api.queries import MetricsQuery
from shoal.api.render import render_job
from shoal.api.routes.jobs import load_job
from shoal.api.routing import Routes
from shoal.curve import thinned
from shoal.identity import Permission
from shoal.samples import Point
from shoal.store import Series, Tx

routes = Routes("metrics")


@routes.add("GET", "/v1/jobs/{job_id}/metrics", Permission.JOB_READ, answers=views.MetricsView)
async def read_metrics(request: Request, job_id: str, query: Annotated[MetricsQuery, Query()]) -> Response:
    """Every curve of a job, or those with these names, by name and node."""
    call = call_of(request)
    job, attempts = await load_job(call, job_id)
    call.allow(job.project, job_id=job.job_id)
    wanted = frozenset(query.name)

    def read(tx: Tx) -> list[views.MetricView]:
        # Rendered here, on a reader's thread: there may be hundreds of thousands of points.
        found = [one for one in tx.metrics.series(job.job_id) if not wanted or one.name in wanted]
        return [_render(one, tx.metrics.points(job.job_id, one), query.points) for one in found]

    curves = await call.plane.core.store.read(read)
    shown = render_job(job, attempts[-1])
    view: views.MetricsView = {
        "ref": shown["ref"],
        "name": shown["name"],
        "status": shown["status"],
        "items": curves,
    }
    return answer(view)


def _render(one: Series, points: list[Point], most: int) -> views.MetricView:
    lows = [point.low for point in points if point.low is not None]
    highs = [point.high for point in points if point.high is not None]
    return {
        "name": one.name,
        "node": one.node or None,
        "axis": one.axis.value,
        "rank": one.rank,
        "heard_at": one.heard_at,
        "low": min(lows, default=None),
        "high": max(highs, default=None),
        "newest": one.newest or (points[-1].x, points[-1].last),
        "points": [(point.x, point.last, point.low, point.high) for point in thinned(points, most)],
    }
