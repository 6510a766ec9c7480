"""Random changes to jobs and attempts, some undone, compared with a model made of dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shoal.errors import StateError
from shoal.model.attempt import Attempt, AttemptState
from shoal.model.job import Job, JobOutcome
from shoal.store import JobFilter, StaleRecord, Store, Tx, open_memory_store
from tests.support.store_records import a_job, an_attempt

PROJECTS = ("speech", "vision")
places = st.integers(min_value=0, max_value=30)


class StoreMachine(RuleBasedStateMachine):
    """The model is what a careful reader of the contract would track by hand."""

    @initialize()
    def open(self) -> None:
        self.store: Store = open_memory_store()
        self.jobs: dict[str, Job] = {}
        self.attempts: dict[str, list[Attempt]] = {}
        self.num_events = 0

    @rule(
        project=st.sampled_from(PROJECTS),
        at=st.integers(0, 5),
        priority=st.integers(-1, 1),
        undo=st.booleans(),
    )
    def submit(self, project: str, at: int, priority: int, undo: bool) -> None:
        def change(tx: Tx) -> Job:
            number = tx.jobs.next_number(project)
            job_id = f"job_{project}_{number:03d}"
            job = a_job(number, job_id=job_id, project=project, submitted_at=float(at), priority=priority)
            tx.jobs.add(job)
            tx.attempts.add(an_attempt(job))
            tx.events.append("job.submitted", at=float(at), actor="user:ana")
            if undo:
                raise StateError("undo")
            return job

        try:
            job = _now(self.store.write, change)
        except StateError:
            return
        assert job.number == 1 + sum(other.project == project for other in self.jobs.values())
        self.jobs[job.job_id] = job
        self.attempts[job.job_id] = [an_attempt(job)]
        self.num_events += 1

    @rule(place=places, state=st.sampled_from(list(AttemptState)), late=st.booleans())
    def move(self, place: int, state: AttemptState, late: bool) -> None:
        """`late` changes the oldest attempt, or repeats what was already done."""
        job = self._pick(place)
        if job is None:
            return
        attempts = self.attempts[job.job_id]
        which = 0 if late else len(attempts) - 1
        moved = msgspec.structs.replace(attempts[which], state=state, version=attempts[which].version + 1)
        _now(self.store.write, lambda tx: tx.attempts.update(moved))
        attempts[which] = moved
        if late:
            assert _stale(self.store, lambda tx: tx.attempts.update(moved))

    @rule(place=places, outcome=st.sampled_from([*JobOutcome, None]), stale=st.booleans())
    def decide(self, place: int, outcome: JobOutcome | None, stale: bool) -> None:
        job = self._pick(place)
        if job is None:
            return
        version = job.version + (2 if stale else 1)
        decided = msgspec.structs.replace(job, outcome=outcome, version=version)
        assert _stale(self.store, lambda tx: tx.jobs.update(decided)) == stale
        if not stale:
            self.jobs[job.job_id] = decided

    @rule(place=places)
    def retry(self, place: int) -> None:
        job = self._pick(place)
        if job is None:
            return
        next_attempt = an_attempt(job, len(self.attempts[job.job_id]) + 1)
        _now(self.store.write, lambda tx: tx.attempts.add(next_attempt))
        self.attempts[job.job_id].append(next_attempt)

    @invariant()
    def store_says_what_the_model_says(self) -> None:
        def check(tx: Tx) -> None:
            newest_first = sorted(
                self.jobs.values(), key=lambda job: (job.submitted_at, job.job_id), reverse=True
            )
            page = [(job, self.attempts[job.job_id][-1]) for job in newest_first]
            assert tx.jobs.page(JobFilter(), None, 1000) == page
            for project in PROJECTS:
                of_project = [job for job in self.jobs.values() if job.project == project]
                assert tx.jobs.count_open(project) == sum(job.is_open for job in of_project)
            for status in ("queued", "running", "failed"):
                listed = tx.jobs.page(JobFilter(statuses=(status,), projects=PROJECTS), None, 1000)
                assert listed == [pair for pair in page if _status(*pair) == status]
            waiting = [pair for pair in page if _status(*pair) == "queued"]
            waiting.sort(key=lambda pair: (-pair[0].priority, pair[0].submitted_at, pair[0].job_id))
            assert tx.attempts.queued(1000) == waiting
            assert tx.events.head().seq == self.num_events
            assert tx.events.verify() is None

        _now(self.store.read, check)

    def _pick(self, place: int) -> Job | None:
        ids = sorted(self.jobs)
        return self.jobs[ids[place % len(ids)]] if ids else None


def _status(job: Job, attempt: Attempt) -> str:
    return job.outcome or attempt.state


def _stale(store: Store, change: Callable[[Tx], None]) -> bool:
    try:
        _now(store.write, change)
    except StaleRecord:
        return True
    return False


def _now(run: Callable[[Callable[[Tx], Any]], Any], fn: Callable[[Tx], Any]) -> Any:
    """The in-memory store never waits, so its coroutines end at their first step."""
    try:
        run(fn).send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("the in-memory store waited")


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=40, stateful_step_count=25)
