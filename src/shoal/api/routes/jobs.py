"""Submit, list, look at, stop and retry jobs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

from fastapi import Query, Request, Response

from shoal.api import views
from shoal.api.admission import read_named
from shoal.api.bodies import parsed, read_model
from shoal.api.call import Call, answer, call_of, idempotency_key
from shoal.api.queries import JobQuery, NoQuery, WhyQuery
from shoal.api.render import (
    checkpoint_of,
    render_attempt,
    render_detail,
    render_explanation,
    render_job,
    render_outlook,
    status_of,
)
from shoal.api.requests import NoBody, SubmitBody
from shoal.api.routes.archives import archives_of
from shoal.api.routing import Routes
from shoal.control.find import Named, find_named
from shoal.control.orders import checkpoint_dir_on
from shoal.errors import ArchiveMissing, NotFound, SpecError
from shoal.identity import Permission
from shoal.model.attempt import Attempt, AttemptState
from shoal.model.job import Job
from shoal.spec import JobSpec
from shoal.store import JobFilter, Tx

routes = Routes("jobs")


@routes.add("POST", "/v1/jobs", Permission.JOB_SUBMIT, answers=views.SubmitView, status=201, body=SubmitBody)
async def submit_job(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """Accept a job, or an array of them. When this answers, it is on disk."""
    call = call_of(request)
    key = idempotency_key(request)
    body, frozen, said = await parsed(await read_named(call, request), call.services.submissions.parse)
    project = _project_for(call, body.project, frozen.spec)
    call.allow(project)
    result = await call.plane.submit(
        call.actor,
        frozen,
        project=project,
        owner=call.person(),
        key=key,
        archive_digest=body.archive,
        left_behind=body.left_behind.told() if body.left_behind else None,
        secrets=body.secrets,
        said=said,
        refusal=missing_archive(call, project, body.archive),
    )
    shown = result.jobs
    # A new job is queued, which needs no look. One that was accepted before may be anywhere, and so may be
    # the first elements of an array when the last is recorded.
    is_new = not result.was_repeated and result.array_id is None
    fresh = [render_job(job, None) for job in shown] if is_new else None
    view: views.SubmitView = {
        "jobs": fresh if fresh is not None else await _as_they_are(call, shown),
        "count": result.count,
        "array_id": result.array_id,
        "was_repeated": result.was_repeated,
    }
    return answer(view, 201)


def _project_for(call: Call, named: str | None, spec: JobSpec) -> str:
    """The project the job goes to: the one named, else the only one there is for this caller."""
    if named is not None and spec.project is not None and named != spec.project:
        raise SpecError(
            f"the request says project `{named}`, its spec `{spec.project}`", hint="drop one of them"
        )
    return named or spec.project or call.only_project()


def missing_archive(call: Call, project: str, digest: str | None) -> ArchiveMissing | None:
    """Why a snapshot that was named cannot be used; None if it can, or none was named."""
    if digest is None or archives_of(call).size_for(project, digest) is not None:
        return None
    return ArchiveMissing(
        f"project `{project}` has no archive {digest}",
        hint=f"upload it first: PUT /v1/archives/{digest}?project={project}",
    )


@routes.add("GET", "/v1/jobs", Permission.JOB_LIST, answers=views.JobPageView)
async def list_jobs(request: Request, query: Annotated[JobQuery, Query()]) -> Response:
    """Jobs of the projects you may see, newest first."""
    call = call_of(request)
    projects = await call.listed(query.project)
    if query.ref is not None:
        return answer(await _find(call, query.ref, projects))
    before = _parse_cursor(query.cursor) if query.cursor else None
    page = await call.plane.core.store.read(lambda tx: _page(tx, query, projects, before))
    shown = page[: query.limit]
    items = [render_job(job, attempt) for job, attempt in shown]
    if query.predict:
        await _add_outlooks(call, items, shown)
    view: views.JobPageView = {
        "items": items,
        "next_cursor": _cursor(shown[-1][0]) if len(page) > query.limit else None,
    }
    return answer(view)


async def _add_outlooks(call: Call, items: list[views.JobView], shown: Sequence[tuple[Job, Attempt]]) -> None:
    """All from the same futures: a page costs about as much as its last job alone."""
    queued = {attempt.attempt_id for _, attempt in shown if attempt.state is AttemptState.QUEUED}
    found = await call.plane.look_ahead(call.actor, queued) if queued else {}
    for item, (_, attempt) in zip(items, shown, strict=True):
        outlook = found.get(attempt.attempt_id)
        item["outlook"] = render_outlook(outlook) if outlook else None


def _page(
    tx: Tx, query: JobQuery, projects: tuple[str, ...] | None, before: tuple[float, str] | None
) -> list[tuple[Job, Attempt]]:
    """One job more than asked for, so that we know whether there is a next page."""
    owner = tx.people.user_by_name(query.owner) if query.owner is not None else None
    if query.owner is not None and owner is None:
        return []
    wanted = JobFilter(
        projects=projects,
        statuses=tuple(query.status) or None,
        name=query.name,
        owner=owner.user_id if owner else None,
        array_id=query.array,
    )
    return tx.jobs.page(wanted, before, query.limit + 1)


async def _find(call: Call, reference: str, projects: tuple[str, ...] | None) -> views.JobPageView:
    """What people may mean by `reference`, at most one job a project."""

    def find(tx: Tx) -> list[tuple[Named, Attempt | None]]:
        where = projects if projects is not None else tuple(p.name for p in tx.people.projects())
        return [(named, tx.attempts.newest(named.job.job_id)) for named in find_named(tx, reference, where)]

    found = await call.plane.core.store.read(find)
    items = [render_job(named.job, attempt) for named, attempt in found]
    view: views.JobPageView = {"items": items, "next_cursor": None}
    if len(found) == 1 and found[0][0].array_id is not None:
        view["array_id"] = found[0][0].array_id
    return view


@routes.add("GET", "/v1/jobs/{job_id}", Permission.JOB_READ, answers=views.JobDetailView)
async def show_job(request: Request, job_id: str, query: Annotated[NoQuery, Query()]) -> Response:
    """One job with its attempts, its frozen spec and, while it waits, why."""
    call = call_of(request)
    job, attempts = await load_job(call, job_id)
    call.allow(job.project, job_id=job.job_id)
    explanation = call.plane.explain(job, attempts) if attempts else None
    return answer(render_detail(job, attempts, explanation, call.plane.core.worlds.of))


@routes.add("GET", "/v1/jobs/{job_id}/why", Permission.JOB_READ, answers=views.WhyView)
async def explain_job(request: Request, job_id: str, query: Annotated[WhyQuery, Query()]) -> Response:
    """Why a job is where it is, in one sentence; if asked, also when it starts and what would start it."""
    call = call_of(request)
    job, attempts = await load_job(call, job_id)
    call.allow(job.project, job_id=job.job_id)
    newest = attempts[-1]
    explanation = call.plane.explain(job, attempts, has_outlook=query.predict)
    status = status_of(job, newest)
    view: views.WhyView = {
        "job": render_job(job, newest),
        "status": status,
        "explanation": render_explanation(explanation) if explanation else None,
        "sentence": explanation.sentence if explanation else _sentence(job, newest, status),
        "checkpoint": checkpoint_of(job),
        "attempts": [render_attempt(attempt, call.plane.core.worlds.of(attempt)) for attempt in attempts],
        "max_failures": job.retry.max_retries + 1,
        "checkpoint_dir": checkpoint_dir_on(
            call.plane.core.engine, job, call.plane.settings.state_dir, attempts
        )
        if attempts[0].allocation
        else None,
    }
    if query.predict:
        outlook = await call.plane.look_ahead_and_around(call.actor, newest.attempt_id)
        view["outlook"] = render_outlook(outlook) if outlook else None
    return answer(view)


def _sentence(job: Job, attempt: Attempt, status: str) -> str:
    if not job.is_open:
        return f"{job.reference} {status}" + (f": {job.because}" if job.because else "")
    if status == "queued":
        return f"{job.reference} is queued and has not been looked at yet"
    return f"{job.reference} is {status} on {', '.join(attempt.node_names)}"


@routes.add("POST", "/v1/jobs/{job_id}/stop", Permission.JOB_STOP, answers=views.JobView, body=NoBody)
async def stop_job(request: Request, job_id: str, query: Annotated[NoQuery, Query()]) -> Response:
    """Ask for a job's end. A job that has ended stays as it is."""
    return await _acted(request, job_id, lambda call, key: call.plane.stop_job(call.actor, job_id, key=key))


@routes.add("POST", "/v1/jobs/{job_id}/retry", Permission.JOB_RETRY, answers=views.JobView, body=NoBody)
async def retry_job(request: Request, job_id: str, query: Annotated[NoQuery, Query()]) -> Response:
    """A new attempt of a job that has ended."""
    return await _acted(request, job_id, lambda call, key: call.plane.retry_job(call.actor, job_id, key=key))


async def _acted(
    request: Request, job_id: str, act: Callable[[Call, str | None], Awaitable[Job]]
) -> Response:
    call = call_of(request)
    key = idempotency_key(request)
    await _allow_action(call, job_id)
    await read_nothing(request)
    job = await act(call, key)
    return answer(render_job(job, (await load_job(call, job_id))[1][-1]))


@routes.add("POST", "/v1/arrays/{array_id}/stop", Permission.JOB_STOP, answers=views.StoppedView, body=NoBody)
async def stop_array(request: Request, array_id: str, query: Annotated[NoQuery, Query()]) -> Response:
    """Ask for the end of every element of an array that has not ended."""
    call = call_of(request)
    key = idempotency_key(request)
    first = await call.plane.core.store.read(lambda tx: tx.jobs.first_in_array(array_id))
    if first is None:
        raise NotFound("no such thing, or one you may not see")
    call.allow(first.project, is_own=first.owner == call.caller.id)
    await read_nothing(request)
    stopped = await call.plane.stop_array(call.actor, array_id, key=key)
    view: views.StoppedView = {
        "array_id": array_id,
        "count": stopped.count,
        "jobs": await _as_they_are(call, stopped.jobs),
    }
    return answer(view)


async def _as_they_are(call: Call, jobs: Sequence[Job]) -> list[views.JobView]:
    """Each job with where its newest attempt is now."""

    def load(tx: Tx) -> list[Attempt | None]:
        return [tx.attempts.newest(job.job_id) for job in jobs]

    attempts = await call.plane.core.store.read(load)
    return [render_job(job, attempt) for job, attempt in zip(jobs, attempts, strict=True)]


async def load_job(call: Call, job_id: str) -> tuple[Job, list[Attempt]]:
    """The job and its attempts, oldest first. Raises the same `NotFound` as for one that may not be seen."""

    def load(tx: Tx) -> tuple[Job | None, list[Attempt]]:
        return tx.jobs.get(job_id), sorted(tx.attempts.of_job(job_id), key=lambda attempt: attempt.epoch)

    job, attempts = await call.plane.core.store.read(load)
    if job is None:
        raise NotFound("no such thing, or one you may not see")
    return job, attempts


async def _allow_action(call: Call, job_id: str) -> None:
    job, _ = await load_job(call, job_id)
    call.allow(job.project, is_own=job.owner == call.caller.id, job_id=job_id)


async def read_nothing(request: Request) -> None:
    """Refuse a body that says something where nothing can be said."""
    if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
        await read_model(request, NoBody)


def _cursor(job: Job) -> str:
    return f"{job.submitted_at.hex()}:{job.job_id}".replace("+", "")


def _parse_cursor(text: str) -> tuple[float, str]:
    at, _, job_id = text.partition(":")
    try:
        return float.fromhex(at), job_id
    except (ValueError, OverflowError) as error:
        raise SpecError(
            "the cursor is not one that this list gave out", hint="begin without a cursor"
        ) from error
