"""New jobs with their first attempts: the most frequent change, in as few statements as possible.

The result equals that of `jobs.next_number`, `jobs.add` and `attempts.add`.

Array operations: requests for all elements of an array that are not complete. Each transaction handles some
elements. Until the row is removed, any process that reads it continues the work: the caller that asked, or a
repeated request, or the control plane after a crash.

Sealed secrets of jobs. They are encrypted before they come here, and the store never sees one open.

Names of files that stayed on submitters' machines. The same list is stored once per project. It only serves a
sentence about a file that a job did not find, so a lost list costs a hint and nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec
from sqlalchemy import bindparam, delete, insert, select, update

from shoal.model.attempt import Attempt
from shoal.model.job import Job
from shoal.store.schema import array_work, left_behind, project_counters, secrets
from shoal.store.session import Session
from shoal.store.tables.attempts import INSERT as INSERT_ATTEMPT
from shoal.store.tables.attempts import attempt_row
from shoal.store.tables.jobs import ADD_COUNTER, job_row
from shoal.store.tables.jobs import INSERT as INSERT_JOB
from shoal.wire import LeftBehind

ADMIT = (
    update(project_counters)
    .where(project_counters.c.project == bindparam("of"))
    .values(
        next_number=project_counters.c.next_number + bindparam("count"),
        open_jobs=project_counters.c.open_jobs + bindparam("count"),
    )
    .returning(project_counters.c.next_number, project_counters.c.open_jobs)
)


class Admission(NamedTuple):
    first: int
    """The first number of a consecutive range that was never used."""
    open_jobs: int
    """Open jobs of the project, these included."""


class JobSubmissions:
    def __init__(self, session: Session) -> None:
        self._session = session

    def admit(self, project: str, count: int) -> Admission:
        """Number the `count` jobs that `add` brings in the same transaction, and count them as open."""
        row = self._session.run(ADMIT, {"of": project, "count": count}).fetchone()
        if row is not None:
            return Admission(row[0] - count, row[1])
        self._session.run(ADD_COUNTER, {"project": project, "next_number": 1 + count, "open_jobs": count})
        return Admission(1, count)

    def add(self, new_jobs: Sequence[tuple[Job, Attempt]]) -> None:
        """Add the admitted open jobs, each with its first attempt."""
        self._session.run_many(INSERT_JOB, [job_row(job, newest=attempt) for job, attempt in new_jobs])
        self._session.run_many(INSERT_ATTEMPT, [attempt_row(attempt) for _, attempt in new_jobs])


_THIS_WORK = (array_work.c.array_id == bindparam("of")) & (array_work.c.verb == bindparam("doing"))
INSERT_WORK = insert(array_work)
GET_WORK = select(array_work.c.actor, array_work.c.last_number).where(_THIS_WORK)
ALL_WORK = select(array_work.c.array_id, array_work.c.verb).order_by(array_work.c.array_id, array_work.c.verb)
MOVE_WORK = update(array_work).where(_THIS_WORK).values(last_number=bindparam("to_last"))
DELETE_WORK = delete(array_work).where(_THIS_WORK)


class ArrayVerb(StrEnum):
    SUBMIT = "submit"
    """Elements still have to be recorded."""
    STOP = "stop"
    """Elements still have to be stopped."""


class ArrayProgress(NamedTuple):
    actor: str
    """The actor of the request, as JSON."""
    last_number: int
    """The job number up to which the operation is complete; 0: none."""


class ArrayWorkTable:
    def __init__(self, session: Session) -> None:
        self._run = session.run

    def begin(self, array_id: str, verb: ArrayVerb, actor: str) -> None:
        """Start the operation from the first element, also if it was under way already."""
        self.end(array_id, verb)
        self._run(INSERT_WORK, {"array_id": array_id, "verb": verb, "actor": actor, "last_number": 0})

    def get(self, array_id: str, verb: ArrayVerb) -> ArrayProgress | None:
        """None: the operation is complete, or was never requested."""
        row = self._run(GET_WORK, {"of": array_id, "doing": verb}).fetchone()
        return None if row is None else ArrayProgress(*row)

    def all(self) -> list[tuple[str, ArrayVerb]]:
        return [(array_id, ArrayVerb(verb)) for array_id, verb in self._run(ALL_WORK)]

    def move(self, array_id: str, verb: ArrayVerb, last_number: int) -> None:
        """Record that the operation is complete up to that number."""
        self._run(MOVE_WORK, {"of": array_id, "doing": verb, "to_last": last_number})

    def end(self, array_id: str, verb: ArrayVerb) -> None:
        """May be repeated."""
        self._run(DELETE_WORK, {"of": array_id, "doing": verb})


INSERT_SECRET = insert(secrets)
GET_SECRET = select(secrets.c.sealed).where(secrets.c.job_id == bindparam("of"))
DROP_SECRET = delete(secrets).where(secrets.c.job_id == bindparam("of"))


class SecretTable:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._run = session.run

    def put(self, job_id: str, sealed: bytes) -> None:
        """Add, or replace."""
        self.drop(job_id)
        self._run(INSERT_SECRET, {"job_id": job_id, "sealed": sealed})

    def get(self, job_id: str) -> bytes | None:
        sealed = self._session.value(GET_SECRET, {"of": job_id})
        return None if sealed is None else bytes(sealed)

    def drop(self, job_id: str) -> None:
        """May be repeated."""
        self._run(DROP_SECRET, {"of": job_id})


INSERT_LEFT_BEHIND = insert(left_behind)
GET_LEFT_BEHIND = select(left_behind.c.body).where(left_behind.c.digest == bindparam("of"))
TOUCH_LEFT_BEHIND = (
    update(left_behind).where(left_behind.c.digest == bindparam("of")).values(used_at=bindparam("at"))
)
_OLD_LEFT_BEHIND = (
    select(left_behind.c.digest)
    .where(left_behind.c.used_at < bindparam("before"))
    .order_by(left_behind.c.used_at)
    .limit(bindparam("most"))
)
PURGE_LEFT_BEHIND = delete(left_behind).where(left_behind.c.digest.in_(_OLD_LEFT_BEHIND))


class LeftBehindTable:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._run = session.run

    def put(self, project: str, files: LeftBehind, at: float) -> str:
        """Keep the list and return its name. The name is valid for one project, so no project learns what
        others have.
        """
        body = msgspec.json.encode(files)
        digest = hashlib.sha256(project.encode() + b"\0" + body).hexdigest()
        if self._run(TOUCH_LEFT_BEHIND, {"of": digest, "at": at}).rowcount == 0:
            self._run(INSERT_LEFT_BEHIND, {"digest": digest, "used_at": at, "body": body})
        return digest

    def get(self, digest: str) -> LeftBehind | None:
        body = self._session.value(GET_LEFT_BEHIND, {"of": digest})
        return None if body is None else msgspec.json.decode(bytes(body), type=LeftBehind)

    def purge(self, before: float, most: int) -> int:
        """Forget at most `most` of the lists that no submission has named since then. Return how many."""
        return self._run(PURGE_LEFT_BEHIND, {"before": before, "most": most}).rowcount
