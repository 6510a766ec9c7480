"""A service: an HTTP server that runs as replicas. Each replica is a job, and a service ties
them together.
"""

from __future__ import annotations

from enum import StrEnum
from statistics import median

import msgspec

from shoal.model.attempt import Attempt, AttemptState
from shoal.model.job import Job

MAX_STARTS = 8
"""A service remembers the startup times of this many replicas."""
MAX_BACKOFF_S = 60.0
RESIZES_KEPT = 20
STEADY_S = 60.0
"""A replica that was ready for this long and fails later did not fail because of its release."""


class RolloutStage(StrEnum):
    """The stage of a rollout."""

    ROLLING = "rolling"
    """Replicas of the new release replace the old ones, one after the other."""
    CANARY = "canary"
    """The new release gets a part of the requests, and Shoal watches it."""
    DONE = "done"
    ROLLED_BACK = "rolled_back"


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """A change from one release to another: the newest one, also when it is complete."""

    old: int
    new: int
    stage: RolloutStage
    step: int = 0
    """The step of a canary, which fixes its part of the requests."""
    share: float | None = None
    """The new release's part of the requests. None: all replicas count alike."""
    since: float
    """When the rollout reached this stage and step."""
    baking_at: float | None = None
    """When all replicas of the canary step became ready. They are watched from then on."""
    failures: int = 0
    """Replicas of the new release that ended before they were ever ready."""
    because: str = ""
    waits: str = ""
    """Why the next replica of the new release cannot start. Empty if there is no known reason."""
    range_before: tuple[int, int] | None = None
    """The least and the most replicas before the new release's file set its own. None if the release set the
    same range, or `scale` has set another since.
    """

    @property
    def is_open(self) -> bool:
        return self.stage in (RolloutStage.ROLLING, RolloutStage.CANARY)


class Resize(msgspec.Struct, frozen=True, kw_only=True):
    """The number of replicas wanted from `at` on."""

    at: float
    replicas: int
    because: str


class ReplicaStart(msgspec.Struct, frozen=True, kw_only=True):
    """How long each phase of one replica's start took, from the decision to its first good answer."""

    release: int
    queued_s: float
    """Until there was room for the replica."""
    starting_s: float
    """Until its program started: files, sandbox, `setup`."""
    loading_s: float
    """Until the replica was ready."""

    @property
    def total_s(self) -> float:
        return self.queued_s + self.starting_s + self.loading_s


class Service(msgspec.Struct, frozen=True, kw_only=True):
    service_id: str
    project: str
    name: str
    owner: str
    """The owner's user id."""
    owner_name: str
    newest: int = 1
    """The number of the newest release; numbers are never used again."""
    live: int = 1
    """The release that serves. While a rollout is open, the old one."""
    rollout: Rollout | None = None
    min_replicas: int
    max_replicas: int
    replicas: int
    """The number of replicas wanted now. Load decides it between those two."""
    scaled_at: float
    resizes: tuple[Resize, ...] = ()
    """The newest changes, in order."""
    starts: tuple[ReplicaStart, ...] = ()
    """Of the last replicas that became ready, the newest last."""
    is_asleep: bool = False
    """The last replica should stop until a request comes."""
    failures: int = 0
    """Replicas that failed in a row, with none that was useful in between."""
    failed_at: float = 0.0
    failed_ref: str = ""
    """The job of the last failed replica."""
    failed_because: str = ""
    """The reason of the last failure: a sentence, and the last log lines."""
    next_slot: int = 1
    stop_asked_by: str | None = None
    """The user who asked the service to end. The service is removed when its last replica has ended."""
    created_at: float
    version: int = 1

    @property
    def reference(self) -> str:
        """The service's name for people, and the path below which it is served."""
        return f"{self.project}/{self.name}"

    def resized(self, replicas: int, because: str, now: float) -> Service:
        """The service with this number of wanted replicas, and the reason."""
        added = Resize(at=now, replicas=replicas, because=because)
        kept = (*self.resizes, added)[-RESIZES_KEPT:]
        return msgspec.structs.replace(self, replicas=replicas, scaled_at=now, resizes=kept)

    def rolled_back(self, rollout: Rollout, now: float) -> Service:
        """The service after this rollout was rolled back, with the range of replicas from before it."""
        over = msgspec.structs.replace(rollout, range_before=None)
        if rollout.range_before is None:
            return msgspec.structs.replace(self, rollout=over)
        low, high = rollout.range_before
        back = msgspec.structs.replace(self, rollout=over, min_replicas=low, max_replicas=high)
        count = min(max(self.replicas, low), high)
        return (
            back
            if count == self.replicas
            else back.resized(count, f"release {rollout.new} was rolled back", now)
        )

    @property
    def cold_start_s(self) -> float:
        """Seconds from room to readiness: the median of the last replicas.

        Waiting for room does not count. If a cluster is full for an hour, Shoal must not keep replicas for
        four.
        """
        return median(start.starting_s + start.loading_s for start in self.starts) if self.starts else 0.0

    @property
    def may_start_at(self) -> float:
        """When the next replica may start. The pause grows while replicas fail."""
        backoff_s = 0.0 if self.failures < 2 else min(2.0 ** min(self.failures - 1, 10), MAX_BACKOFF_S)
        return self.failed_at + backoff_s


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """A service's spec, frozen under a number."""

    service_id: str
    number: int
    spec_json: str
    """The service spec in its canonical JSON form."""
    archive_digest: str | None = None
    left_behind: str | None = None
    """The same as in a `Job`."""
    priority: int = 0
    model: str = ""
    created_at: float
    by: str = ""
    owner: str = ""
    """The id of the user who made the release and owns its replicas. Empty: the service's owner."""
    owner_name: str = ""
    because: str = ""
    """What is new in the release. Empty for the first."""

    @property
    def secrets_id(self) -> str:
        """The id under which the release's secrets are sealed, until the service is removed."""
        return f"{self.service_id}.{self.number}"


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One server of a service, for as long as its job exists. It has the id of its job."""

    replica_id: str
    service_id: str
    release: int
    slot: int
    """The replica's number in the order of starts. Never used again."""
    created_at: float
    attempt_id: str = ""
    """The attempt whose supervisor reported the fields below."""
    address: str = ""
    is_ready: bool = False
    is_asleep: bool = False
    because: str = ""
    ready_at: float | None = None
    """When the replica first became ready."""
    start: ReplicaStart | None = None
    """How long its start took."""
    draining_at: float | None = None
    """Since when the replica gets no new requests."""


def is_serving(replica: Replica, job: Job, attempt: Attempt) -> bool:
    """Whether the replica can get requests, by the last report of its present supervisor."""
    is_up = attempt.state is AttemptState.RUNNING and job.is_open and job.stop_asked_by is None
    return is_up and replica.is_ready and replica.attempt_id == attempt.attempt_id
