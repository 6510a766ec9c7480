"""A job's logs: a page at a time, or as they are written."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request, Response

from shoal.api import views
from shoal.api.call import answer, call_of
from shoal.api.follow import Followed, follow
from shoal.api.logs import Position, Wanted, parse_position, read_page, read_tail
from shoal.api.queries import LogQuery
from shoal.api.routes.jobs import load_job
from shoal.api.routing import Routes
from shoal.api.sse import EventStream
from shoal.errors import NotFound, SpecError
from shoal.identity import Permission
from shoal.model.attempt import Attempt, AttemptState

routes = Routes("logs")


@routes.add("GET", "/v1/jobs/{job_id}/logs", Permission.JOB_READ, answers=views.LogPageView)
async def read_logs(request: Request, job_id: str, query: Annotated[LogQuery, Query()]) -> Response:
    """Lines of one attempt, oldest first."""
    call = call_of(request)
    job, attempts = await load_job(call, job_id)
    call.allow(job.project, job_id=job.job_id)
    position = _position(query, query.cursor)
    epoch = position.epoch if position else query.attempt
    attempt = _attempt(attempts, epoch)
    engine = call.plane.core.engine
    if query.tail is not None:
        page = await read_tail(engine, attempt, _wanted(query), query.tail)
    else:
        begin = position or Position(attempt.epoch)
        page = await read_page(engine, attempt, begin, query.limit, _wanted(query))
    is_complete = page.is_complete and attempt.state is AttemptState.ENDED
    view: views.LogPageView = {
        "items": [line.view for line in page.lines],
        "next_cursor": None if is_complete else str(page.position),
        "is_complete": is_complete,
    }
    return answer(view)


@routes.add(
    "GET", "/v1/jobs/{job_id}/logs/stream", Permission.JOB_READ, answers=None, media_type="text/event-stream"
)
async def stream_logs(request: Request, job_id: str, query: Annotated[LogQuery, Query()]) -> Response:
    """Lines as they are written, over all attempts from the chosen one on, until the job has ended."""
    call = call_of(request)
    job, attempts = await load_job(call, job_id)
    call.allow(job.project, job_id=job.job_id)
    last_id = request.headers.get("last-event-id")
    position = _position(query, last_id or query.cursor)
    if position is None and query.attempt is not None:
        position = Position(_attempt(attempts, query.attempt).epoch)
    if position is not None:
        position.offsets_for(_attempt(attempts, position.epoch))
    tail = None if last_id else query.tail
    wanted = Followed(job_id, position, last_id is not None, _wanted(query), tail)
    return EventStream(call, follow(call, wanted))


def _wanted(query: LogQuery) -> Wanted:
    return Wanted(query.rank, query.stacks)


def _position(query: LogQuery, cursor: str | None) -> Position | None:
    if cursor is None:
        return None
    if query.tail is not None and query.cursor is not None:
        raise SpecError("`tail` and `cursor` exclude each other", hint="drop one of them")
    return parse_position(cursor)


def _attempt(attempts: list[Attempt], epoch: int | None) -> Attempt:
    """The attempt with this epoch, the newest for None."""
    for attempt in reversed(attempts):
        if epoch is None or attempt.epoch == epoch:
            return attempt
    raise NotFound(f"the job has no attempt {epoch}", hint="attempts are counted from 1")
