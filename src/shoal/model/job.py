"""A job: what a person asked for, frozen, and what became of it."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from shoal.model.request import Request
from shoal.wire import Probe


class JobOutcome(StrEnum):
    """How a job ended. Until then it has none, and its newest attempt tells where it is."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class DependencyKind(StrEnum):
    """What a dependency must have done."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    ENDED = "ended"


class Dependency(msgspec.Struct, frozen=True, kw_only=True):
    job_id: str
    label: str
    """How people name that job."""
    on: DependencyKind = DependencyKind.SUCCEEDED


class ArrayPlace(msgspec.Struct, frozen=True, kw_only=True):
    """One element of an array."""

    array_id: str
    index: int
    size: int
    at_once: int | None = None
    """How many elements may hold resources together."""


class ReplicaPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The job is a replica of a service."""

    service_id: str
    service: str
    """Its name."""
    release: int
    slot: int
    probe: Probe
    model: str = ""
    """The checkpoint that it serves: `JOB_ID/FOLDER` below where checkpoints are kept."""


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Only the program's own failures are counted: what the cluster lost is repeated for free."""

    max_retries: int = 0
    on: frozenset[str] = frozenset({"exit", "signal"})
    """Of `exit signal oom setup time_limit`."""
    backoff_s: float = 5.0
    """Before the first retry; doubles each time, up to an hour."""
    in_place: bool = True
    """Ranks that failed are first started anew where they are."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    job_id: str
    project: str
    number: int
    """Small, per project, never reused: `vision/17`."""
    name: str
    owner: str
    """The user's id."""
    owner_name: str
    queue: str = "default"
    priority: int = 0
    request: Request
    retry: RetryPolicy = RetryPolicy()
    spec_json: str
    """The frozen spec in its canonical JSON form."""
    after: tuple[Dependency, ...] = ()
    array: ArrayPlace | None = None
    replica: ReplicaPlace | None = None
    archive_digest: str | None = None
    left_behind: str | None = None
    """The name of a list: which files of the submitter's folder did not travel."""
    submitted_at: float
    deadline_at: float | None = None
    """When it should have ended. One that misses it runs on."""
    epoch: int = 1
    """Of the newest attempt."""
    failures: int = 0
    """Attempts that ended by the program's own fault and were counted against `retry`."""
    losses: int = 0
    """Attempts that the cluster lost, since and with the last that had run for long: not counted against
    `retry`."""
    evictions: int = 0
    """Attempts that gave way to other jobs: not counted against `retry` either."""
    excluded_nodes: tuple[str, ...] = ()
    avoided_nodes: tuple[str, ...] = ()
    """Where somebody else stopped the last attempt, and may have the room now: the next one goes elsewhere if
    it can."""
    stop_asked_by: str | None = None
    outcome: JobOutcome | None = None
    because: str = ""
    """One sentence about the end."""
    exit_code: int | None = None
    ended_at: float | None = None
    version: int = 1

    @property
    def is_open(self) -> bool:
        return self.outcome is None

    @property
    def reference(self) -> str:
        """How people name it."""
        return f"{self.project}/{self.number}"
