"""Jobs: numbered per project, guarded by version, listed newest first without counting or skipping."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

from sqlalchemy import Select, and_, bindparam, func, insert, select, tuple_, update

from shoal.model.attempt import Attempt, AttemptState
from shoal.model.job import Job, JobOutcome
from shoal.store.base import JobFilter, StaleRecord
from shoal.store.schema import attempts, events, jobs, project_counters
from shoal.store.session import Session, decode_attempt, decode_job, encode

MAX_STREAMS = 64
"""A filter with more combinations of project and status walks all jobs by age instead."""
CHUNK = 500
"""Ids in one IN list."""
FEW = 16
"""Up to this many ids it is cheaper to query them one by one, since a list has to be composed."""

INSERT = insert(jobs)
BY_ID = select(jobs.c.body).where(jobs.c.job_id == bindparam("id"))
BY_NUMBER = select(jobs.c.body).where(
    jobs.c.project == bindparam("project"), jobs.c.number == bindparam("number")
)
NEWEST_NAMED = (
    select(jobs.c.body)
    .where(jobs.c.project == bindparam("project"), jobs.c.name == bindparam("name"))
    .order_by(jobs.c.number.desc())
    .limit(1)
)
OUTCOME = select(jobs.c.outcome).where(jobs.c.job_id == bindparam("id"), jobs.c.version == bindparam("seen"))
NEWEST_STATE = (
    select(attempts.c.state).where(attempts.c.attempt_id == jobs.c.newest_attempt_id).scalar_subquery()
)
UPDATE = (
    update(jobs)
    .where(jobs.c.job_id == bindparam("id"), jobs.c.version == bindparam("seen"))
    .values(
        priority=bindparam("to_priority"),
        outcome=bindparam("to_outcome"),
        version=bindparam("to_version"),
        body=bindparam("to_body"),
        status=func.coalesce(bindparam("to_status"), NEWEST_STATE, AttemptState.QUEUED.value),
    )
)
TAKE_NUMBERS = (
    update(project_counters)
    .where(project_counters.c.project == bindparam("of"))
    .values(next_number=project_counters.c.next_number + bindparam("count"))
    .returning(project_counters.c.next_number)
)
COUNT_OPEN = (
    update(project_counters)
    .where(project_counters.c.project == bindparam("of"))
    .values(open_jobs=project_counters.c.open_jobs + bindparam("more"))
)
ADD_COUNTER = insert(project_counters)
OPEN_JOBS = select(project_counters.c.open_jobs).where(project_counters.c.project == bindparam("of"))
OUTCOME_OF = select(jobs.c.job_id, jobs.c.outcome).where(jobs.c.job_id == bindparam("id"))
OUTCOMES = select(jobs.c.job_id, jobs.c.outcome).where(jobs.c.job_id.in_(bindparam("ids", expanding=True)))
NUMBERS = select(jobs.c.job_id, jobs.c.project, jobs.c.number).where(
    jobs.c.job_id.in_(bindparam("ids", expanding=True))
)
IN_ARRAY = jobs.c.array_id == bindparam("array_id")
# A condition on what `jobs_by_array` carries alone, so a walk along it never visits the table.
IS_OPEN = and_(*(jobs.c.status != outcome.value for outcome in JobOutcome))
# By number and not by id: an id made after a restart with a clock that was set back is lower.
OPEN_IN_ARRAY = (
    select(jobs.c.number, jobs.c.job_id)
    .where(IN_ARRAY, IS_OPEN, jobs.c.number > bindparam("after"))
    .order_by(jobs.c.number)
    .limit(bindparam("limit"))
)
COUNT_OPEN_IN_ARRAY = select(func.count()).select_from(jobs).where(IN_ARRAY, IS_OPEN)
COUNT_IN_ARRAY = select(func.count()).select_from(jobs).where(IN_ARRAY)
FIRST_IN_ARRAY = select(jobs.c.body).where(IN_ARRAY).order_by(jobs.c.number).limit(bindparam("limit"))
WITH_NEWEST_ATTEMPT = select(jobs.c.body, attempts.c.body.label("attempt_body")).join_from(
    jobs, attempts, attempts.c.attempt_id == jobs.c.newest_attempt_id
)
CHANGED = WITH_NEWEST_ATTEMPT.where(
    jobs.c.job_id.in_(select(events.c.job_id).where(events.c.seq > bindparam("after")))
)
BY_IDS = WITH_NEWEST_ATTEMPT.where(jobs.c.job_id.in_(bindparam("ids", expanding=True)))
BY_STATUS = select(jobs.c.status, func.count()).group_by(jobs.c.status)

JobCursor = tuple[float, str]
"""(submitted_at, job_id): a job's position in a listing. The next page continues there."""


class JobTable:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._run = session.run
        self._loaded: dict[str, Job] = {}
        """Jobs as this transaction has read or left them."""

    def forget(self) -> None:
        """Forget what was loaded. The writer calls this when it undoes a change."""
        self._loaded.clear()

    def add(self, job: Job) -> None:
        """Its number must come from `next_number`. Its first attempt is added beside it."""
        self._run(INSERT, job_row(job))
        if job.is_open:
            self._count_open(job.project, 1)

    def get(self, job_id: str) -> Job | None:
        loaded = self._loaded.get(job_id)
        if loaded is None:
            loaded = _decode_optional(self._session.value(BY_ID, {"id": job_id}))
            if loaded is not None:
                self._loaded[job_id] = loaded
        return loaded

    def by_number(self, project: str, number: int) -> Job | None:
        return _decode_optional(self._session.value(BY_NUMBER, {"project": project, "number": number}))

    def newest_named(self, project: str, name: str) -> Job | None:
        """By number, not by time: clocks jump."""
        return _decode_optional(self._session.value(NEWEST_NAMED, {"project": project, "name": name}))

    def next_number(self, project: str, count: int = 1) -> int:
        """Take `count` numbers in a row and return the first. A number is never given twice."""
        after = self._session.value(TAKE_NUMBERS, {"of": project, "count": count})
        if after is None:
            self._run(ADD_COUNTER, {"project": project, "next_number": 1 + count, "open_jobs": 0})
            return 1
        return int(after) - count

    def update(self, job: Job) -> None:
        """Replace the record whose version is one less. `StaleRecord` if there is no such record."""
        seen = {"id": job.job_id, "seen": job.version - 1}
        loaded = self._loaded.get(job.job_id)
        if loaded is not None and loaded.version == job.version - 1:
            was_open = loaded.is_open
        else:
            before = self._run(OUTCOME, seen).fetchone()
            was_open = before is not None and before[0] is None
        changes = {
            "to_priority": job.priority,
            "to_outcome": job.outcome,
            "to_status": job.outcome,
            "to_version": job.version,
            "to_body": encode(job),
        }
        if self._run(UPDATE, seen | changes).rowcount == 0:
            raise StaleRecord(f"job {job.reference} is no longer at version {job.version - 1}")
        self._loaded[job.job_id] = job
        if was_open != job.is_open:
            self._count_open(job.project, 1 if job.is_open else -1)

    def count_open(self, project: str) -> int:
        """How many jobs of the project have not ended. Reads one row, whatever the number."""
        return self._session.value(OPEN_JOBS, {"of": project}) or 0

    def count_by_status(self, projects: tuple[str, ...] | None = None) -> dict[str, int]:
        """Walks an index of all jobs of these projects. Use it for an overview, not in a loop."""
        query = BY_STATUS if projects is None else BY_STATUS.where(jobs.c.project.in_(projects))
        return dict(self._session.query(query).all())

    def outcomes(self, job_ids: Iterable[str]) -> dict[str, JobOutcome | None]:
        """The outcomes by job id: None for an open job. A job that does not exist is left out."""
        wanted = list(job_ids)
        rows: list[Iterable[Any]] = (
            [self._run(OUTCOME_OF, {"id": job_id}) for job_id in wanted]
            if len(wanted) <= FEW
            else [self._session.query(OUTCOMES, {"ids": ids}) for ids in chunks(wanted)]
        )
        return {
            job_id: JobOutcome(outcome) if outcome else None for chunk in rows for job_id, outcome in chunk
        }

    def references(self, job_ids: Iterable[str]) -> dict[str, str]:
        """The names for people by job id. A job that does not exist is left out."""
        rows = [self._session.query(NUMBERS, {"ids": ids}) for ids in chunks(sorted(set(job_ids)))]
        return {job_id: f"{project}/{number}" for chunk in rows for job_id, project, number in chunk}

    def changed_since(self, seq: int) -> list[tuple[Job, Attempt]]:
        """Every job that has an event after that one, with its newest attempt."""
        rows = self._run(CHANGED, {"after": seq})
        return [(decode_job(job), decode_attempt(attempt)) for job, attempt in rows]

    def open_in_array(self, array_id: str, after: int, limit: int) -> list[tuple[int, str]]:
        """The numbers and ids of the next open elements behind that number, by index."""
        values = {"array_id": array_id, "after": after, "limit": limit}
        return [(number, job_id) for number, job_id in self._run(OPEN_IN_ARRAY, values)]

    def count_open_in_array(self, array_id: str) -> int:
        return int(self._session.value(COUNT_OPEN_IN_ARRAY, {"array_id": array_id}))

    def count_in_array(self, array_id: str) -> int:
        """How many elements of the array are recorded."""
        return int(self._session.value(COUNT_IN_ARRAY, {"array_id": array_id}))

    def first_in_array(self, array_id: str) -> Job | None:
        """The element with the lowest index."""
        return _decode_optional(self._session.value(FIRST_IN_ARRAY, {"array_id": array_id, "limit": 1}))

    def in_array(self, array_id: str, limit: int) -> list[Job]:
        """The first elements of the array."""
        rows = self._run(FIRST_IN_ARRAY, {"array_id": array_id, "limit": limit})
        return [decode_job(body) for (body,) in rows]

    def page(
        self, wanted: JobFilter, before: JobCursor | None = None, limit: int = 100
    ) -> list[tuple[Job, Attempt]]:
        """The `limit` newest jobs submitted before that position, each with its newest attempt.

        Each combination of project and status is one walk along one index, merged here: a single query over
        several would sort all that match. A name, owner or array has its own index.
        """
        places: list[JobCursor] = []
        for keys in _keys(wanted, before):
            places.extend((at, job_id) for at, job_id in self._session.query(keys.limit(limit)))
        chosen = [job_id for _, job_id in heapq.nlargest(limit, places)]
        by_id: dict[str, tuple[Job, Attempt]] = {}
        for ids in chunks(chosen):
            for job_body, attempt_body in self._session.query(BY_IDS, {"ids": ids}):
                job = decode_job(job_body)
                by_id[job.job_id] = (job, decode_attempt(attempt_body))
        return [by_id[job_id] for job_id in chosen if job_id in by_id]

    def _count_open(self, project: str, more: int) -> None:
        if self._run(COUNT_OPEN, {"of": project, "more": more}).rowcount == 0:
            self._run(ADD_COUNTER, {"project": project, "next_number": 1, "open_jobs": more})


def job_row(job: Job, newest: Attempt | None = None) -> dict[str, Any]:
    """The job as a row of its table. `newest`: an attempt that is added beside it."""
    return {
        "job_id": job.job_id,
        "project": job.project,
        "number": job.number,
        "name": job.name,
        "owner": job.owner,
        "priority": job.priority,
        "submitted_at": job.submitted_at,
        "array_id": job.array.array_id if job.array else None,
        "outcome": job.outcome,
        "status": job.outcome or (newest.state if newest else AttemptState.QUEUED),
        "newest_attempt_id": newest.attempt_id if newest else None,
        "newest_epoch": newest.epoch if newest else 0,
        "version": job.version,
        "body": encode(job),
    }


def _decode_optional(body: str | None) -> Job | None:
    return None if body is None else decode_job(body)


def chunks(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(ids), CHUNK):
        yield ids[start : start + CHUNK]


def _keys(wanted: JobFilter, before: JobCursor | None) -> Iterator[Select[Any]]:
    """Queries for the positions of matching jobs, newest first. No job is in two of them."""
    keys = select(jobs.c.submitted_at, jobs.c.job_id)
    keys = keys.order_by(jobs.c.submitted_at.desc(), jobs.c.job_id.desc())
    if before is not None:
        keys = keys.where(tuple_(jobs.c.submitted_at, jobs.c.job_id) < before)
    narrow = ((jobs.c.array_id, wanted.array_id), (jobs.c.name, wanted.name), (jobs.c.owner, wanted.owner))
    conditions = [(column, value) for column, value in narrow if value is not None]
    projects = (None,) if wanted.projects is None else sorted(set(wanted.projects))
    statuses = (None,) if wanted.statuses is None else sorted(set(wanted.statuses))
    if not conditions and len(projects) * len(statuses) <= MAX_STREAMS:
        for project, status in product(projects, statuses):
            stream = keys if project is None else keys.where(jobs.c.project == project)
            yield stream if status is None else stream.where(jobs.c.status == status)
        return
    for column, value in conditions[:1]:
        keys = keys.where(column == value)
    # An expression keeps a planner without statistics on the index that we mean.
    for column, value in conditions[1:]:
        keys = keys.where(column.concat("") == value)
    for column, values in ((jobs.c.project, wanted.projects), (jobs.c.status, wanted.statuses)):
        if values is not None:
            keys = keys.where(column.concat("").in_(values))
    yield keys
