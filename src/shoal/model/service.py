"""A service: an HTTP server that runs as replicas. Each replica is a job; here is what ties them together."""

from __future__ import annotations

from enum import StrEnum
from statistics import median

import msgspec

from shoal.model.attempt import Attempt, AttemptState
from shoal.model.job import Job

MAX_STARTS = 8
"""Of so many replicas a service remembers how long they took to become ready."""
MAX_BACKOFF_S = 60.0
RESIZES_KEPT = 20
STEADY_S = 60.0
"""A replica that was ready for so long and fails later did not fail because of its release."""


class Stage(StrEnum):
    """Where a rollout is."""

    ROLLING = "rolling"
    """Replicas of the new release take the place of the old ones, one after the other."""
    CANARY = "canary"
    """The new release has a part of the requests and is watched."""
    DONE = "done"
    ROLLED_BACK = "rolled_back"


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """From one release to another; the newest there was, also when it is over."""

    old: int
    new: int
    stage: Stage
    step: int = 0
    """Of a canary: which share of the requests it has."""
    share: float | None = None
    """Of the requests, for the new release; None: all replicas alike."""
    since: float
    """When it came to this stage and step."""
    baking_at: float | None = None
    """Of a canary: since when all replicas of the step are ready and watched."""
    failures: int = 0
    """Replicas of the new release that ended before they were ever ready."""
    because: str = ""
    waits: str = ""
    """Why no further replica of the new release can be started; empty: one can, as far as anybody knows."""
    range_before: tuple[int, int] | None = None
    """The least and the most replicas before the new release's file set its own; None: it set the same, or
    `scale` has set others since."""

    @property
    def is_open(self) -> bool:
        return self.stage in (Stage.ROLLING, Stage.CANARY)


class Resize(msgspec.Struct, frozen=True, kw_only=True):
    """From then on there should be so many replicas."""

    at: float
    replicas: int
    because: str


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica's way from the wish for it to its first good answer was made of."""

    release: int
    queued_s: float
    """Until there was room for it."""
    starting_s: float
    """Until its program was started: files, sandbox, `setup`."""
    loading_s: float
    """Until it was ready."""

    @property
    def total_s(self) -> float:
        return self.queued_s + self.starting_s + self.loading_s


class Service(msgspec.Struct, frozen=True, kw_only=True):
    service_id: str
    project: str
    name: str
    owner: str
    """The user's id."""
    owner_name: str
    newest: int = 1
    """The number of the newest release; numbers are never used again."""
    live: int = 1
    """The release that serves; while a rollout is open, the old one."""
    rollout: Rollout | None = None
    min_replicas: int
    max_replicas: int
    replicas: int
    """How many there should be now: decided by load between those two."""
    scaled_at: float
    resizes: tuple[Resize, ...] = ()
    """The newest, in their order."""
    starts: tuple[Start, ...] = ()
    """Of the last replicas that became ready, the newest last."""
    is_asleep: bool = False
    """Its last replica should sleep."""
    failures: int = 0
    """Replicas that failed one after the other without having been of use in between."""
    failed_at: float = 0.0
    failed_ref: str = ""
    """The job of the last of them."""
    failed_because: str = ""
    """Its reason: a sentence, and its last words."""
    next_slot: int = 1
    stop_asked_by: str | None = None
    """It ends: gone when its last replica is."""
    created_at: float
    version: int = 1

    @property
    def reference(self) -> str:
        """How people name it, and below which path it is served."""
        return f"{self.project}/{self.name}"

    def resized(self, replicas: int, because: str, now: float) -> Service:
        """With so many replicas to be there, and why."""
        added = Resize(at=now, replicas=replicas, because=because)
        kept = (*self.resizes, added)[-RESIZES_KEPT:]
        return msgspec.structs.replace(self, replicas=replicas, scaled_at=now, resizes=kept)

    def taken_back(self, rollout: Rollout, now: float) -> Service:
        """With this rollout, which was taken back, and with the range of replicas from before it."""
        over = msgspec.structs.replace(rollout, range_before=None)
        if rollout.range_before is None:
            return msgspec.structs.replace(self, rollout=over)
        low, high = rollout.range_before
        back = msgspec.structs.replace(self, rollout=over, min_replicas=low, max_replicas=high)
        count = min(max(self.replicas, low), high)
        return (
            back
            if count == self.replicas
            else back.resized(count, f"release {rollout.new} was taken back", now)
        )

    @property
    def cold_start_s(self) -> float:
        """What a replica takes, once there is room for it, until it is ready: the middle of the last ones.

        Waiting for room is no part of it: a cluster that is full for an hour must not keep replicas for four.
        """
        return median(one.starting_s + one.loading_s for one in self.starts) if self.starts else 0.0

    @property
    def may_start_at(self) -> float:
        """When the next replica may be started: later and later while they fail."""
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
    """As of a `Job`."""
    priority: int = 0
    model: str = ""
    created_at: float
    by: str = ""
    owner: str = ""
    """The id of the user who made it, and whose its replicas are; empty: the service's."""
    owner_name: str = ""
    because: str = ""
    """What is new in it; empty for the first."""

    @property
    def secrets_id(self) -> str:
        """Under which its secrets are sealed, until the service is gone."""
        return f"{self.service_id}.{self.number}"


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One server of a service, for as long as its job is there. The job's id is its own."""

    replica_id: str
    service_id: str
    release: int
    slot: int
    """Its place in the order of their starts; never used again."""
    created_at: float
    attempt_id: str = ""
    """Whose supervisor said what follows."""
    address: str = ""
    is_ready: bool = False
    is_asleep: bool = False
    because: str = ""
    ready_at: float | None = None
    """When it first was."""
    start: Start | None = None
    """How it came there."""
    draining_at: float | None = None
    """Since when it is given nothing new."""


def is_serving(replica: Replica, job: Job, attempt: Attempt) -> bool:
    """Whether it can be given requests, by what its present supervisor said last."""
    is_up = attempt.state is AttemptState.RUNNING and job.is_open and job.stop_asked_by is None
    return is_up and replica.is_ready and replica.attempt_id == attempt.attempt_id
