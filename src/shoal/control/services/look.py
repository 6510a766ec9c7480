"""One service as it is recorded, and what is only known in memory about it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from shoal.control.core import Core
from shoal.control.services.replicas import spec_of_release
from shoal.model.attempt import Attempt, AttemptState
from shoal.model.job import Job
from shoal.model.node import NodeState
from shoal.model.service import Release, Replica, Service, is_serving
from shoal.serving.life import Seen
from shoal.serving.traffic import Sample, Stats
from shoal.spec.service import ServiceSpec
from shoal.store import Tx

SILENT_S = 30.0
"""A replica whose supervisor was not heard from for so long counts for nothing; another takes its place."""
NO_ROOM_S = 5.0
"""A replica that was not placed for so long has no room: whoever frees some does it sooner, or much later."""

Server = tuple[Replica, Job, Attempt]


class Look(msgspec.Struct, frozen=True, kw_only=True):
    service: Service
    releases: Mapping[int, Release]
    """Those that replicas may be of."""
    servers: tuple[Server, ...]
    draining: frozenset[str] = frozenset()
    """Nodes that are being emptied, of those that replicas are on."""

    def spec(self, number: int) -> ServiceSpec:
        return spec_of_release(self.releases[number].spec_json)


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What the event loop knows; taken there, and used in the writer's thread."""

    silent: frozenset[str] = frozenset()
    """Replicas whose supervisors say nothing."""
    idle: frozenset[str] = frozenset()
    """Those that drain, as every data plane knows, and have nothing left."""
    samples: tuple[Sample, ...] = ()
    at: float = 0.0
    """Now, on the clock of the samples."""
    waits: Mapping[str, str] = {}
    """By replica: why it waits."""
    old_stats: Stats = msgspec.field(default_factory=Stats)
    new_stats: Stats = msgspec.field(default_factory=Stats)
    """Of the two releases of a rollout, since its step began."""
    watched_s: float | None = None
    """How long the step of a canary was watched with all its replicas ready; None: they were not yet."""


def waits(core: Core, look: Look) -> dict[str, str]:
    """Why replicas that were not placed yet wait, by the scheduler's last plan. On the event loop."""
    found: dict[str, str] = {}
    for replica, job, attempt in look.servers:
        if job.is_open and attempt.state is AttemptState.QUEUED:
            told = core.planner.explain(attempt.attempt_id, core.clock.now())
            found |= {replica.replica_id: told.sentence} if told is not None else {}
    return found


def load(tx: Tx, service_id: str) -> Look | None:
    service = tx.services.get(service_id)
    if service is None:
        return None
    servers = tuple(tx.services.replicas(service_id))
    numbers = {service.live, service.newest, *(replica.release for replica, _, _ in servers)}
    numbers |= {service.rollout.old, service.rollout.new} if service.rollout else set()
    found = {number: tx.services.release(service_id, number) for number in sorted(numbers)}
    releases = {number: release for number, release in found.items() if release is not None}
    names = {name for _, _, attempt in servers for name in attempt.node_names}
    draining = {name for name in names if (node := tx.nodes.get(name)) and node.state is NodeState.DRAINING}
    return Look(service=service, releases=releases, servers=servers, draining=frozenset(draining))


def view(core: Core, look: Look) -> View:
    """On the event loop."""
    silent = {
        replica.replica_id
        for replica, job, attempt in look.servers
        if job.is_open
        and attempt.state is AttemptState.RUNNING
        and core.leases.silent_nodes(attempt, SILENT_S)
    }
    book, service = core.services, look.service
    at = core.clock.monotonic()
    drained = (
        one.replica_id for one, _, _ in look.servers if one.draining_at is not None or service.is_asleep
    )
    old, new = book.since_step(service)
    return View(
        silent=frozenset(silent),
        idle=frozenset(one for one in drained if book.is_idle(one, at)),
        samples=book.traffic.samples(service.project, service.name),
        at=at,
        waits=waits(core, look),
        old_stats=old,
        new_stats=new,
        watched_s=book.watched_s(service, at),
    )


def seen(look: Look, known: View, now: float) -> list[Seen]:
    """The replicas whose stop nobody has asked for."""
    return [
        Seen(
            replica_id=replica.replica_id,
            release=replica.release,
            slot=replica.slot,
            is_ready=is_serving(replica, job, attempt),
            is_leaving=not look.draining.isdisjoint(attempt.node_names),
            draining_s=None if replica.draining_at is None else max(0.0, now - replica.draining_at),
            is_idle=replica.replica_id in known.idle,
            failing=_failing(replica, known),
            waits=known.waits.get(replica.replica_id, "") if now - attempt.queued_at >= NO_ROOM_S else "",
        )
        for replica, job, attempt in look.servers
        if job.is_open and job.stop_asked_by is None
    ]


def _failing(replica: Replica, known: View) -> str:
    return f"not heard from for {SILENT_S:g} s" if replica.replica_id in known.silent else ""
