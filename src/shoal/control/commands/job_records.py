"""Find the job or array that a person means by a reference; record that jobs are to end."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable

import msgspec

from shoal.control.actor import Actor
from shoal.control.record import AttemptRecorder, record_event
from shoal.errors import NotFound
from shoal.model.attempt import Attempt, EndReason
from shoal.model.job import Job
from shoal.model.moves import StopRequested
from shoal.model.service import is_serving
from shoal.spec.array import MAX_INDEX
from shoal.store import JobFilter, Tx

PAGE = 500
ELEMENT = re.compile(r"(?P<array>.+)\[(?P<index>[0-9]{1,9})\]", re.ASCII)


class ReferencedJob(msgspec.Struct, frozen=True):
    """A job that a reference names. `array_id`: the reference names that whole array, and `job` is its newest
    element.
    """

    job: Job
    array_id: str | None = None


def resolve_reference(tx: Tx, reference: str, projects: Collection[str]) -> list[ReferencedJob]:
    """Return what `reference` may mean among `projects`, at most one thing in each.

    `job_...`, `vision/17` and `17` are one job. `arr_...` is an array. A name is the newest job of that
    name; where that is an element of an array, it is the array. `NAME[2]` is the element with that
    index.
    Where it is a replica, one that lives stands for its service.
    """
    if (element := ELEMENT.fullmatch(reference)) is not None:
        whole, index = element["array"], int(element["index"])
        arrays = [named for named in resolve_reference(tx, whole, projects) if named.array_id is not None]
        return [ReferencedJob(job) for named in arrays if (job := _element(tx, named.job, index)) is not None]
    project, slash, rest = reference.rpartition("/")
    if slash:
        projects = (project,) if project in projects else ()
    elif reference.startswith("job_"):
        return _in_projects([tx.jobs.get(reference)], projects)
    elif reference.startswith("arr_"):
        newest = tx.jobs.page(JobFilter(array_id=reference), None, 1)
        return _in_projects((job for job, _ in newest), projects, is_name=True)
    if rest.isascii() and rest.isdigit() and len(rest) < 19:
        return _in_projects((tx.jobs.by_number(name, int(rest)) for name in projects), projects)
    named = (tx.jobs.newest_named(name, rest) for name in projects)
    return _in_projects(
        (_representative(tx, job) for job in named if job is not None), projects, is_name=True
    )


def _representative(tx: Tx, newest: Job) -> Job:
    """Return a living replica in place of a service's newest one, preferably of the release that serves,
    because the end of the newest says nothing about the service. Any other job is returned as it is.
    """
    service = tx.services.get(newest.replica.service_id) if newest.replica is not None else None
    if service is None:
        return newest
    living = [
        (replica.release == service.live, is_serving(replica, job, attempt), job.number, job)
        for replica, job, attempt in tx.services.replicas(service.service_id)
        if job.is_open and job.stop_asked_by is None
    ]
    return max(living, key=lambda entry: entry[:3])[3] if living else newest


def _in_projects(
    jobs: Iterable[Job | None], projects: Collection[str], *, is_name: bool = False
) -> list[ReferencedJob]:
    return [
        ReferencedJob(job, job.array.array_id if is_name and job.array else None)
        for job in jobs
        if job is not None and job.project in projects
    ]


def _element(tx: Tx, newest: Job, index: int) -> Job | None:
    """Return the element with this index of the array whose newest element is `newest`."""
    assert newest.array is not None
    array_id, size = newest.array.array_id, newest.array.size
    first = tx.jobs.first_in_array(array_id)
    assert first is not None

    def index_at(place: int) -> int:
        job = tx.jobs.by_number(first.project, first.number + place)
        return MAX_INDEX + 1 if job is None or job.array is None else job.array.index

    # Elements are numbered in the order of their indices. The last ones may not be recorded.
    place = bisect_left(range(size), index, key=index_at)
    element = tx.jobs.by_number(first.project, first.number + place) if place < size else None
    return (
        element
        if element is not None and element.array is not None and element.array.index == index
        else None
    )


def elements_of(tx: Tx, array_id: str) -> list[Job]:
    """Return every recorded element, by index."""
    elements: list[Job] = []
    before = None
    while page := tx.jobs.page(JobFilter(array_id=array_id), before, PAGE):
        elements += (job for job, _ in page)
        before = (elements[-1].submitted_at, elements[-1].job_id)
    return sorted(elements, key=lambda job: job.number)


def ask_to_stop(
    recorder: AttemptRecorder, tx: Tx, actor: Actor, job_ids: list[str], now: float, *, is_noted: bool = True
) -> list[tuple[Job, Attempt]]:
    """Record that the jobs are to end. Return them, because the engine has to stop what may still run.

    `is_noted`: record an event for each request. What becomes of a job always has an event.
    """
    for job_id in job_ids:
        job, attempt = load_job(tx, job_id)
        if not job.is_open or job.stop_asked_by is not None:
            continue
        stopping = msgspec.structs.replace(job, stop_asked_by=actor.name, version=job.version + 1)
        tx.jobs.update(stopping)
        if is_noted:
            record_event(tx, "job.stop_asked", now, actor, job=job, attempt=attempt)
        stop = StopRequested(reason=EndReason.CANCELLED, by=actor.name)
        recorder.advance(tx, attempt.attempt_id, stop, actor)
    return [load_job(tx, job_id) for job_id in job_ids]


def load_job(tx: Tx, job_id: str) -> tuple[Job, Attempt]:
    """Return the job and its newest attempt. `NotFound`: there is none."""
    job, attempt = tx.jobs.get(job_id), tx.attempts.newest(job_id)
    if job is None or attempt is None:
        raise NotFound(f"no job `{job_id}`", hint="shoal queue --all")
    return job, attempt
