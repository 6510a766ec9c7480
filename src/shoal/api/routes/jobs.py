"""Submit, list, look at, stop and retry jobs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

from fastapi import Query, Request, Response

from shoal.api.call import Call, call_of, idempotency_key, json_response, read_for_project
from shoal.api.http.bodies import parse_body, read_model
from shoal.api.queries import JobQuery, NoQuery, WhyQuery
from shoal.api.requests import NoBody, SubmitBody
from shoal.api.routes.archives import archives_of
from shoal.api.routing import RouteGroup
from shoal.api.views import schema
from shoal.api.views.render import (
    checkpoint_of,
    render_attempt,
    render_detail,
    render_explanation,
    render_job,
    render_outlook,
    status_of,
)
from shoal.control.commands import arrays as array_commands
from shoal.control.commands import explain as explaining
from shoal.control.commands import jobs as job_commands
from shoal.control.commands import submit as submitting
from shoal.control.commands.job_records import ReferencedJob, resolve_reference
from shoal.control.job_specs import checkpoint_dir_on
from shoal.errors import ArchiveMissing, NotFound, SpecError
from shoal.identity import Permission
from shoal.model.attempt import Attempt, AttemptState
from shoal.model.job import Job
from shoal.scheduler import Explanation
from shoal.spec import JobSpec
from shoal.store import JobFilter, Tx

routes = RouteGroup("jobs")


@routes.add("POST", "/v1/jobs", Permission.JOB_SUBMIT, answers=schema.SubmitView, status=201, body=SubmitBody)
async def submit_job(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """Accept a job, or an array of them. When this answers, the job is on disk."""
    call = call_of(request)
    key = idempotency_key(request)
    body, frozen, raw_fields = await parse_body(
        await read_for_project(call, request), call.services.submissions.parse
    )
    project = _project_for(call, body.project, frozen.spec)
    call.allow(project)
    submission = submitting.SubmitRequest(
        spec=frozen,
        project=project,
        owner=call.person(),
        archive_digest=body.archive,
        left_behind=body.left_behind.to_wire() if body.left_behind else None,
        secrets=body.secrets,
        raw_request=raw_fields,
        refusal=missing_archive(call, project, body.archive),
    )
    result = await submitting.submit(call.core.admission, call.actor, submission, key)
    shown = result.jobs
    # A new job is queued, so its state is known. A job that was accepted before may be in any state, and so
    # may the first elements of an array when the last is recorded.
    is_new = not result.was_repeated and result.array_id is None
    fresh = [render_job(job, None) for job in shown] if is_new else None
    view: schema.SubmitView = {
        "jobs": fresh if fresh is not None else await _with_current_state(call, shown),
        "count": result.count,
        "array_id": result.array_id,
        "was_repeated": result.was_repeated,
    }
    return json_response(view, 201)


def _project_for(call: Call, named: str | None, spec: JobSpec) -> str:
    """The project of the job: the named one, else the caller's only one."""
    if named is not None and spec.project is not None and named != spec.project:
        raise SpecError(
            f"the request names project `{named}`, its spec names `{spec.project}`", hint="drop one of them"
        )
    return named or spec.project or call.only_project()


def missing_archive(call: Call, project: str, digest: str | None) -> ArchiveMissing | None:
    """Why a named snapshot cannot be used. None if it can, or if none was named."""
    if digest is None or archives_of(call).size_for(project, digest) is not None:
        return None
    return ArchiveMissing(
        f"project `{project}` has no archive {digest}",
        hint=f"upload it first: PUT /v1/archives/{digest}?project={project}",
    )


@routes.add("GET", "/v1/jobs", Permission.JOB_LIST, answers=schema.JobPageView)
async def list_jobs(request: Request, query: Annotated[JobQuery, Query()]) -> Response:
    """Jobs of the projects you may see, newest first."""
    call = call_of(request)
    projects = await call.visible_in(query.project)
    if query.ref is not None:
        return json_response(await _find(call, query.ref, projects))
    before = _parse_cursor(query.cursor) if query.cursor else None
    page = await call.core.records.store.read(lambda tx: _page(tx, query, projects, before))
    shown = page[: query.limit]
    items = [render_job(job, attempt) for job, attempt in shown]
    if query.predict:
        await _add_outlooks(call, items, shown)
    view: schema.JobPageView = {
        "items": items,
        "next_cursor": _cursor(shown[-1][0]) if len(page) > query.limit else None,
    }
    return json_response(view)


async def _add_outlooks(
    call: Call, items: list[schema.JobView], shown: Sequence[tuple[Job, Attempt]]
) -> None:
    """All outlooks come from the same scenarios, so a page costs about as much as its last job alone."""
    queued = {attempt.attempt_id for _, attempt in shown if attempt.state is AttemptState.QUEUED}
    predictions = (
        await explaining.predict_starts(
            call.core.records.clock, call.core.planning, call.core.link.engine, call.actor, queued
        )
        if queued
        else {}
    )
    for item, (_, attempt) in zip(items, shown, strict=True):
        outlook = predictions.get(attempt.attempt_id)
        item["outlook"] = render_outlook(outlook) if outlook else None


def _page(
    tx: Tx, query: JobQuery, projects: tuple[str, ...] | None, before: tuple[float, str] | None
) -> list[tuple[Job, Attempt]]:
    """One job more than requested, to learn whether there is a next page."""
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


async def _find(call: Call, reference: str, projects: tuple[str, ...] | None) -> schema.JobPageView:
    """The jobs that `reference` can mean, at most one per project."""

    def find(tx: Tx) -> list[tuple[ReferencedJob, Attempt | None]]:
        where = projects if projects is not None else tuple(p.name for p in tx.people.projects())
        return [
            (named, tx.attempts.newest(named.job.job_id)) for named in resolve_reference(tx, reference, where)
        ]

    job_ids = await call.core.records.store.read(find)
    items = [render_job(named.job, attempt) for named, attempt in job_ids]
    view: schema.JobPageView = {"items": items, "next_cursor": None}
    if len(job_ids) == 1 and job_ids[0][0].array_id is not None:
        view["array_id"] = job_ids[0][0].array_id
    return view


@routes.add("GET", "/v1/jobs/{job_id}", Permission.JOB_READ, answers=schema.JobDetailView)
async def show_job(request: Request, job_id: str, query: Annotated[NoQuery, Query()]) -> Response:
    """One job with its attempts, its frozen spec and, while it waits, why."""
    call = call_of(request)
    job, attempts = await load_job(call, job_id)
    call.allow(job.project, job_id=job.job_id)
    explanation = _explanation(call, job, attempts) if attempts else None
    return json_response(render_detail(job, attempts, explanation, call.core.running.worlds.of))


@routes.add("GET", "/v1/jobs/{job_id}/why", Permission.JOB_READ, answers=schema.WhyView)
async def explain_job(request: Request, job_id: str, query: Annotated[WhyQuery, Query()]) -> Response:
    """Why a job is in its state, in one sentence; on request also when it starts and what would start it."""
    call = call_of(request)
    job, attempts = await load_job(call, job_id)
    call.allow(job.project, job_id=job.job_id)
    newest = attempts[-1]
    explanation = _explanation(call, job, attempts)
    if explanation is not None and query.predict:
        # The outlook says what would start the job.
        explanation = explaining.without_hint(explanation, job)
    status = status_of(job, newest)
    view: schema.WhyView = {
        "job": render_job(job, newest),
        "status": status,
        "explanation": render_explanation(explanation) if explanation else None,
        "sentence": explanation.sentence if explanation else _sentence(job, newest, status),
        "checkpoint": checkpoint_of(job),
        "attempts": [render_attempt(attempt, call.core.running.worlds.of(attempt)) for attempt in attempts],
        "max_failures": job.retry.max_retries + 1,
        "checkpoint_dir": checkpoint_dir_on(
            call.core.link.engine, job, call.core.settings.state_dir, attempts
        )
        if attempts[0].allocation
        else None,
    }
    if query.predict:
        outlook = await explaining.predict_start_with_changes(
            call.core.records.clock, call.core.planning, call.core.link.engine, call.actor, newest.attempt_id
        )
        view["outlook"] = render_outlook(outlook) if outlook else None
    return json_response(view)


def _explanation(call: Call, job: Job, attempts: Sequence[Attempt]) -> Explanation | None:
    core = call.core
    return explaining.explain(core.records.clock, core.running, core.planning, core.link, job, attempts)


def _sentence(job: Job, attempt: Attempt, status: str) -> str:
    if not job.is_open:
        return f"{job.reference} {status}" + (f": {job.because}" if job.because else "")
    if status == "queued":
        return f"{job.reference} is queued and has not been planned"
    return f"{job.reference} is {status} on {', '.join(attempt.node_names)}"


@routes.add("POST", "/v1/jobs/{job_id}/stop", Permission.JOB_STOP, answers=schema.JobView, body=NoBody)
async def stop_job(request: Request, job_id: str, query: Annotated[NoQuery, Query()]) -> Response:
    """Ask for a job's end. A job that has ended stays as it is."""
    return await _acted(
        request,
        job_id,
        lambda call, key: job_commands.stop_job(
            call.core.records, call.core.link.engine, call.actor, job_id, key=key
        ),
    )


@routes.add("POST", "/v1/jobs/{job_id}/retry", Permission.JOB_RETRY, answers=schema.JobView, body=NoBody)
async def retry_job(request: Request, job_id: str, query: Annotated[NoQuery, Query()]) -> Response:
    """A new attempt of a job that has ended."""
    return await _acted(
        request,
        job_id,
        lambda call, key: job_commands.retry_job(call.core.admission, call.actor, job_id, key=key),
    )


async def _acted(
    request: Request, job_id: str, act: Callable[[Call, str | None], Awaitable[Job]]
) -> Response:
    call = call_of(request)
    key = idempotency_key(request)
    await _allow_action(call, job_id)
    await require_empty_body(request)
    job = await act(call, key)
    return json_response(render_job(job, (await load_job(call, job_id))[1][-1]))


@routes.add(
    "POST", "/v1/arrays/{array_id}/stop", Permission.JOB_STOP, answers=schema.StoppedView, body=NoBody
)
async def stop_array(request: Request, array_id: str, query: Annotated[NoQuery, Query()]) -> Response:
    """Ask for the end of every element of an array that has not ended."""
    call = call_of(request)
    key = idempotency_key(request)
    first = await call.core.records.store.read(lambda tx: tx.jobs.first_in_array(array_id))
    if first is None:
        raise NotFound("no such thing, or one you may not see")
    call.allow(first.project, is_own=first.owner == call.caller.id)
    await require_empty_body(request)
    stopped = await array_commands.stop_array(
        call.core.records, call.core.link.engine, call.core.sealing, call.actor, array_id, key=key
    )
    view: schema.StoppedView = {
        "array_id": array_id,
        "count": stopped.count,
        "jobs": await _with_current_state(call, stopped.jobs),
    }
    return json_response(view)


async def _with_current_state(call: Call, jobs: Sequence[Job]) -> list[schema.JobView]:
    """Each job with the state of its newest attempt."""

    def load(tx: Tx) -> list[Attempt | None]:
        return [tx.attempts.newest(job.job_id) for job in jobs]

    attempts = await call.core.records.store.read(load)
    return [render_job(job, attempt) for job, attempt in zip(jobs, attempts, strict=True)]


async def load_job(call: Call, job_id: str) -> tuple[Job, list[Attempt]]:
    """The job and its attempts, oldest first. Raises the same `NotFound` if the job is missing or may not be
    seen.
    """

    def load(tx: Tx) -> tuple[Job | None, list[Attempt]]:
        return tx.jobs.get(job_id), sorted(tx.attempts.of_job(job_id), key=lambda attempt: attempt.epoch)

    job, attempts = await call.core.records.store.read(load)
    if job is None:
        raise NotFound("no such thing, or one you may not see")
    return job, attempts


async def _allow_action(call: Call, job_id: str) -> None:
    job, _ = await load_job(call, job_id)
    call.allow(job.project, is_own=job.owner == call.caller.id, job_id=job_id)


async def require_empty_body(request: Request) -> None:
    """Refuse a body with fields for a route that takes none."""
    if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
        await read_model(request, NoBody)


def _cursor(job: Job) -> str:
    return f"{job.submitted_at.hex()}:{job.job_id}".replace("+", "")


def _parse_cursor(text: str) -> tuple[float, str]:
    at, _, job_id = text.partition(":")
    try:
        return float.fromhex(at), job_id
    except (ValueError, OverflowError) as error:
        raise SpecError("the cursor is not from this list", hint="begin without a cursor") from error
