"""A job: what a person asked for, frozen, and how it ended.

Its `ResourceRequest` is parsed once from the spec and compared many times by the scheduler.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from shoal.wire import ProbeSpec


class GpuRequest(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs per node. If `kind` is None any whole device fits, but never a MIG slice."""

    count: int
    kind: str | None = None
    milli: int = 1000
    """Thousandths of its one GPU. 1000 if the request is for several GPUs."""

    @property
    def amount(self) -> float:
        """The amount as a person writes it: a count, or a fraction of one GPU."""
        return self.count * self.milli / 1000


def can_be_looser(within: str | None) -> bool:
    """Whether a hint may suggest to drop this constraint. A pool can be a part that an engine
    does not mix.
    """
    return within is not None and within != "pool"


class TopologyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Where the nodes of a gang must be. A preferred closeness never delays a start.

    `within`: all nodes are in one domain of this level. `spread`: no two nodes are in the same domain of that
    level.
    """

    within: str | None = None
    is_required: bool = True
    spread: str | None = None

    @property
    def can_be_looser(self) -> bool:
        return self.is_required and can_be_looser(self.within)


class ResourceRequest(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """What a job needs on each node, unless a field says otherwise.

    If no memory is asked for, the job gets memory in proportion to its part of the CPUs or GPUs.
    """

    min_nodes: int = 1
    max_nodes: int = 1
    cpus: float = 1.0
    memory_bytes: int | None = None
    disk_bytes: int = 0
    gpus: GpuRequest | None = None
    ranks_per_node: int = 1
    is_exclusive: bool = False
    """The job takes all of each node and shares it with no other job."""
    exclude: tuple[str, ...] = ()
    """Names of nodes that the job must not use."""
    require: tuple[tuple[str, str], ...] = ()
    """Labels that each of its nodes must have, sorted."""
    topology: TopologyRequest | None = None
    time_limit_s: float | None = None
    grace_s: float = 0.0
    """From the signal at its time limit to the kill."""

    @property
    def longest_s(self) -> float | None:
        """The longest time for which the job holds resources. None if it has no time limit."""
        return None if self.time_limit_s is None else self.time_limit_s + self.grace_s


class JobOutcome(StrEnum):
    """How a job ended. An open job has no outcome; its newest attempt has its state."""

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
    """The job's name for people."""
    on: DependencyKind = DependencyKind.SUCCEEDED


class ArrayElement(msgspec.Struct, frozen=True, kw_only=True):
    """One element of an array."""

    array_id: str
    index: int
    size: int
    at_once: int | None = None
    """How many elements may hold resources at the same time."""


class ReplicaRef(msgspec.Struct, frozen=True, kw_only=True):
    """Marks a job that is a replica of a service."""

    service_id: str
    service: str
    """The service's name."""
    release: int
    slot: int
    probe: ProbeSpec
    model: str = ""
    """The checkpoint that the replica serves: `JOB_ID/FOLDER` below the checkpoint root."""


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """When a job is tried again. Only the program's own failures count; what the cluster lost is repeated for
    free.
    """

    max_retries: int = 0
    on: frozenset[str] = frozenset({"exit", "signal"})
    """Of `exit signal oom setup time_limit`."""
    backoff_s: float = 5.0
    """Before the first retry. It doubles each time, up to an hour."""
    in_place: bool = True
    """First restart failed ranks where they are."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    job_id: str
    project: str
    number: int
    """Small, per project, never reused: the 17 of `vision/17`."""
    name: str
    owner: str
    """The owner's user id."""
    owner_name: str
    queue: str = "default"
    priority: int = 0
    request: ResourceRequest
    retry: RetryPolicy = RetryPolicy()
    spec_json: str
    """The frozen spec in its canonical JSON form."""
    after: tuple[Dependency, ...] = ()
    array: ArrayElement | None = None
    replica: ReplicaRef | None = None
    archive_digest: str | None = None
    left_behind: str | None = None
    """The name of a list of files that stayed in the submitter's folder."""
    submitted_at: float
    deadline_at: float | None = None
    """When the job should have ended. A job that misses its deadline keeps running."""
    epoch: int = 1
    """The epoch of the newest attempt."""
    failures: int = 0
    """Attempts that ended by the program's own fault and were counted against `retry`."""
    losses: int = 0
    """Attempts that the cluster lost, from the last one that had run for long (inclusive). They do not count
    against `retry`.
    """
    evictions: int = 0
    """Attempts that gave way to other jobs. They do not count against `retry` either."""
    excluded_nodes: tuple[str, ...] = ()
    avoided_nodes: tuple[str, ...] = ()
    """Nodes where the cluster stopped the last attempt by its own rules and another user may have the room
    now. The next attempt goes elsewhere if it can.
    """
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
        """The job's name for people, such as `vision/17`."""
        return f"{self.project}/{self.number}"
