"""New jobs with their first attempts: the busiest change there is, in as few statements as it takes.

What is left afterwards is what `jobs.next_number`, `jobs.add` and `attempts.add` would leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import bindparam, update

from shoal.model.attempt import Attempt
from shoal.model.job import Job
from shoal.store.attempts import INSERT as INSERT_ATTEMPT
from shoal.store.attempts import attempt_row
from shoal.store.jobs import ADD_COUNTER, job_row
from shoal.store.jobs import INSERT as INSERT_JOB
from shoal.store.prepared import Session
from shoal.store.schema import project_counters

ADMIT = (
    update(project_counters)
    .where(project_counters.c.project == bindparam("of"))
    .values(
        next_number=project_counters.c.next_number + bindparam("count"),
        open_jobs=project_counters.c.open_jobs + bindparam("count"),
    )
    .returning(project_counters.c.next_number, project_counters.c.open_jobs)
)


class Admitted(NamedTuple):
    first: int
    """The first of a row of numbers, none of them ever given before."""
    open_jobs: int
    """Of the project, these included."""


class Submissions:
    def __init__(self, session: Session) -> None:
        self._session = session

    def admit(self, project: str, count: int) -> Admitted:
        """Number `count` jobs that `add` brings in the same transaction, and count them as open."""
        row = self._session.run(ADMIT, {"of": project, "count": count}).fetchone()
        if row is not None:
            return Admitted(row[0] - count, row[1])
        self._session.run(ADD_COUNTER, {"project": project, "next_number": 1 + count, "open_jobs": count})
        return Admitted(1, count)

    def add(self, made: Sequence[tuple[Job, Attempt]]) -> None:
        """Add the open jobs that were admitted, each with its first attempt."""
        self._session.run_many(INSERT_JOB, [job_row(job, newest=attempt) for job, attempt in made])
        self._session.run_many(INSERT_ATTEMPT, [attempt_row(attempt) for _, attempt in made])
