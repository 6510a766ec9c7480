"""One service as it is recorded (`ServiceSnapshot`), and what only memory knows of it (`ServiceActivity`)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from shoal.clock import Clock
from shoal.control.memory.running import RunningAttempts
from shoal.control.services.replicas import spec_of_release
from shoal.control.services.state import ServiceState
from shoal.model.attempt import Attempt, AttemptState
from shoal.model.job import Job
from shoal.model.node import NodeState
from shoal.model.service import Release, Replica, Service, is_serving
from shoal.scheduler import Planner
from shoal.serving.scaling.replica_steps import ObservedReplica
from shoal.serving.scaling.traffic import Sample, Stats
from shoal.spec.service import ServiceSpec
from shoal.store import Tx

SILENT_S = 30.0
"""A replica whose supervisor has been silent for longer does not count, and another takes its place."""
NO_ROOM_S = 5.0
"""A replica that was not placed for this long has no room. If other jobs make room, they do it sooner than
that, or much later.
"""

ReplicaRecord = tuple[Replica, Job, Attempt]


class ServiceSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    service: Service
    releases: Mapping[int, Release]
    """The releases that replicas may be of."""
    replicas: tuple[ReplicaRecord, ...]
    draining: frozenset[str] = frozenset()
    """The nodes of its replicas that are draining."""

    def spec(self, number: int) -> ServiceSpec:
        return spec_of_release(self.releases[number].spec_json)


class ServiceActivity(msgspec.Struct, frozen=True, kw_only=True):
    """What the event loop knows, read there and used in the writer's thread."""

    silent: frozenset[str] = frozenset()
    """Replicas whose supervisors are silent."""
    idle: frozenset[str] = frozenset()
    """Draining replicas that have no requests left, as every data plane confirms."""
    samples: tuple[Sample, ...] = ()
    at: float = 0.0
    """The time now, on the clock of the samples."""
    waits: Mapping[str, str] = {}
    """By replica: why it waits."""
    old_stats: Stats = msgspec.field(default_factory=Stats)
    new_stats: Stats = msgspec.field(default_factory=Stats)
    """Counts of the two releases of a rollout since its step began."""
    watched_s: float | None = None
    """How long the step of a canary was watched with all its replicas ready. None: they were
    not all ready.
    """


def waiting_reasons(clock: Clock, planner: Planner, snapshot: ServiceSnapshot) -> dict[str, str]:
    """Return why replicas wait to be placed, by the scheduler's last plan. Only on the event loop."""
    reasons: dict[str, str] = {}
    for replica, job, attempt in snapshot.replicas:
        if job.is_open and attempt.state is AttemptState.QUEUED:
            explanation = planner.explain(attempt.attempt_id, clock.now())
            reasons |= {replica.replica_id: explanation.sentence} if explanation is not None else {}
    return reasons


def load_snapshot(tx: Tx, service_id: str) -> ServiceSnapshot | None:
    service = tx.services.get(service_id)
    if service is None:
        return None
    replicas = tuple(tx.services.replicas(service_id))
    numbers = {service.live, service.newest, *(replica.release for replica, _, _ in replicas)}
    numbers |= {service.rollout.old, service.rollout.new} if service.rollout else set()
    recorded = {number: tx.services.release(service_id, number) for number in sorted(numbers)}
    releases = {number: release for number, release in recorded.items() if release is not None}
    names = {name for _, _, attempt in replicas for name in attempt.node_names}
    draining = {name for name in names if (node := tx.nodes.get(name)) and node.state is NodeState.DRAINING}
    return ServiceSnapshot(
        service=service, releases=releases, replicas=replicas, draining=frozenset(draining)
    )


def service_activity(
    clock: Clock,
    running: RunningAttempts,
    planner: Planner,
    services: ServiceState,
    snapshot: ServiceSnapshot,
) -> ServiceActivity:
    """Read the activity. Only on the event loop."""
    silent = {
        replica.replica_id
        for replica, job, attempt in snapshot.replicas
        if job.is_open
        and attempt.state is AttemptState.RUNNING
        and running.leases.silent_nodes(attempt, SILENT_S)
    }
    service, at = snapshot.service, clock.monotonic()
    drained = (
        replica.replica_id
        for replica, _, _ in snapshot.replicas
        if replica.draining_at is not None or service.is_asleep
    )
    old, new = services.since_step(service)
    return ServiceActivity(
        silent=frozenset(silent),
        idle=frozenset(replica_id for replica_id in drained if services.is_idle(replica_id, at)),
        samples=services.traffic.samples(service.project, service.name),
        at=at,
        waits=waiting_reasons(clock, planner, snapshot),
        old_stats=old,
        new_stats=new,
        watched_s=services.watched_s(service, at),
    )


def open_replicas(snapshot: ServiceSnapshot, activity: ServiceActivity, now: float) -> list[ObservedReplica]:
    """Return the replicas that were not asked to stop."""
    return [
        ObservedReplica(
            replica_id=replica.replica_id,
            release=replica.release,
            slot=replica.slot,
            is_ready=is_serving(replica, job, attempt),
            is_leaving=not snapshot.draining.isdisjoint(attempt.node_names),
            draining_s=None if replica.draining_at is None else max(0.0, now - replica.draining_at),
            is_idle=replica.replica_id in activity.idle,
            failing=_failing_because(replica, activity),
            waits=activity.waits.get(replica.replica_id, "") if now - attempt.queued_at >= NO_ROOM_S else "",
        )
        for replica, job, attempt in snapshot.replicas
        if job.is_open and job.stop_asked_by is None
    ]


def _failing_because(replica: Replica, activity: ServiceActivity) -> str:
    return f"not heard from for {SILENT_S:g} s" if replica.replica_id in activity.silent else ""
