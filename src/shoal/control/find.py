"""From what people type to the job or the array they mean."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable

import msgspec

from shoal.model.job import Job
from shoal.model.service import is_serving
from shoal.spec.array import MAX_INDEX
from shoal.store import JobFilter, Tx

PAGE = 500
ELEMENT = re.compile(r"(?P<array>.+)\[(?P<index>[0-9]{1,9})\]", re.ASCII)


class Named(msgspec.Struct, frozen=True):
    """`array_id`: the reference names that whole array, and `job` is its newest element."""

    job: Job
    array_id: str | None = None


def find_named(tx: Tx, reference: str, projects: Collection[str]) -> list[Named]:
    """What `reference` may mean among `projects`, at most one thing in each.

    `job_...`, `vision/17` and `17` are one job. `arr_...` is an array. A name is the newest job of that
    name; where that is an element of an array, it is the array. `NAME[2]` is the element with that index.
    Where it is a replica, one that lives stands for its service.
    """
    if (element := ELEMENT.fullmatch(reference)) is not None:
        whole, index = element["array"], int(element["index"])
        arrays = [named for named in find_named(tx, whole, projects) if named.array_id is not None]
        return [Named(job) for named in arrays if (job := _element(tx, named.job, index)) is not None]
    project, slash, rest = reference.rpartition("/")
    if slash:
        projects = (project,) if project in projects else ()
    elif reference.startswith("job_"):
        return _in([tx.jobs.get(reference)], projects)
    elif reference.startswith("arr_"):
        newest = tx.jobs.page(JobFilter(array_id=reference), None, 1)
        return _in((job for job, _ in newest), projects, is_name=True)
    if rest.isascii() and rest.isdigit() and len(rest) < 19:
        return _in((tx.jobs.by_number(name, int(rest)) for name in projects), projects)
    named = (tx.jobs.newest_named(name, rest) for name in projects)
    return _in((_shown_of(tx, job) for job in named if job is not None), projects, is_name=True)


def _shown_of(tx: Tx, newest: Job) -> Job:
    """Of the replicas of a service one that lives, of the release that serves if there is any: what its
    newest died of says nothing about it. The same for every other job.
    """
    service = tx.services.get(newest.replica.service_id) if newest.replica is not None else None
    if service is None:
        return newest
    living = [
        (replica.release == service.live, is_serving(replica, job, attempt), job.number, job)
        for replica, job, attempt in tx.services.replicas(service.service_id)
        if job.is_open and job.stop_asked_by is None
    ]
    return max(living, key=lambda one: one[:3])[3] if living else newest


def _in(jobs: Iterable[Job | None], projects: Collection[str], *, is_name: bool = False) -> list[Named]:
    return [
        Named(job, job.array.array_id if is_name and job.array else None)
        for job in jobs
        if job is not None and job.project in projects
    ]


def _element(tx: Tx, newest: Job, index: int) -> Job | None:
    """The element with this index of the array that `newest` is the newest one of."""
    assert newest.array is not None
    array_id, size = newest.array.array_id, newest.array.size
    first = tx.jobs.first_in_array(array_id)
    assert first is not None

    def index_at(place: int) -> int:
        job = tx.jobs.by_number(first.project, first.number + place)
        return MAX_INDEX + 1 if job is None or job.array is None else job.array.index

    # Elements are numbered in the order of their indices. The last ones may be still to be recorded.
    place = bisect_left(range(size), index, key=index_at)
    found = tx.jobs.by_number(first.project, first.number + place) if place < size else None
    return found if found is not None and found.array is not None and found.array.index == index else None


def elements_of(tx: Tx, array_id: str) -> list[Job]:
    """Every recorded element, by index."""
    found: list[Job] = []
    before = None
    while page := tx.jobs.page(JobFilter(array_id=array_id), before, PAGE):
        found += (job for job, _ in page)
        before = (found[-1].submitted_at, found[-1].job_id)
    return sorted(found, key=lambda job: job.number)
