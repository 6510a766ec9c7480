"""Views of services."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from typing_extensions import TypedDict

from shoal.control.services.snapshot import ReplicaRecord, ServiceSnapshot
from shoal.model.attempt import AttemptState
from shoal.model.service import Release, ReplicaStart, Rollout, Service, is_serving
from shoal.serving.scaling.traffic import Sample


class StartView(TypedDict):
    """The parts of a replica's start, from the decision to its first good answer: until there was room, until
    its program was started, until it was ready.
    """

    queued_s: float
    starting_s: float
    loading_s: float


class ReplicaView(TypedDict):
    """`state`: `queued starting running stopping`; once it serves, `ready` or `asleep`; before its end,
    `draining`.
    """

    job_id: str
    ref: str
    release: int
    slot: int
    state: str
    nodes: list[str]
    address: str
    because: str
    started_at: float | None
    cold_start_s: float | None
    start: StartView | None


class ReleaseView(TypedDict):
    number: int
    model: str
    created_at: float
    by: str
    because: str


class RolloutView(TypedDict):
    old: int
    new: int
    stage: str
    step: int
    share: float | None
    since: float
    because: str
    waits: str


class ResizeView(TypedDict):
    at: float
    replicas: int
    because: str


class LoadView(TypedDict):
    """The last second: the most requests in replicas and waiting for a replica, and how many ended."""

    in_flight: int
    queued: int
    rps: int


class ServiceView(TypedDict):
    """`replicas`: the number wanted, from `min_replicas` to `max_replicas`. `ready`: the number that serve.

    `cold_start_s`: the median of `starts`, of which the newest is last, without the wait for room.
    """

    id: str
    ref: str
    project: str
    name: str
    owner: str
    path: str
    url: str | None
    hosts: list[str]
    release: int
    newest_release: int
    rollout: RolloutView | None
    min_replicas: int
    max_replicas: int
    replicas: int
    ready: int
    is_stopping: bool
    failures: int
    model: str
    cold_start_s: float | None
    starts: list[StartView]
    created_at: float


class ServedView(ServiceView):
    """`because`: what is new in the new release; empty without a new release, and for the first."""

    because: str


class FailureView(TypedDict):
    """The last replica that ended by itself. `because`: a sentence, and its last log lines."""

    ref: str
    at: float
    because: str


class ServiceDetailView(ServiceView):
    """`waits` of a rollout: why it has no room. `load`: null without a recent report of a data plane."""

    load: LoadView | None
    failure: FailureView | None
    resizes: list[ResizeView]
    servers: list[ReplicaView]
    releases: list[ReleaseView]
    spec: dict[str, Any]


class ServicePageView(TypedDict):
    items: list[ServiceView]
    next_cursor: str | None


class TableView(TypedDict):
    """See `serving/table.py`."""

    version: int
    epoch: str
    services: list[dict[str, Any]]


class ReportedView(TypedDict):
    """The newest table's version."""

    version: int


def render_service(snapshot: ServiceSnapshot, base: str | None) -> ServiceView:
    """`base`: the URL prefix of services, if it is known."""
    service = snapshot.service
    path = f"/{service.project}/{service.name}/"
    return {
        "id": service.service_id,
        "ref": service.reference,
        "project": service.project,
        "name": service.name,
        "owner": service.owner_name,
        "path": path,
        "url": base + path if base is not None else None,
        "hosts": list(snapshot.spec(service.live).hosts),
        "release": service.live,
        "newest_release": service.newest,
        "rollout": _rollout(service.rollout) if service.rollout else None,
        "min_replicas": service.min_replicas,
        "max_replicas": service.max_replicas,
        "replicas": service.replicas,
        "ready": sum(is_serving(*server) and server[0].draining_at is None for server in snapshot.replicas),
        "is_stopping": service.stop_asked_by is not None,
        "failures": service.failures,
        "model": snapshot.releases[service.live].model,
        "cold_start_s": service.cold_start_s if service.starts else None,
        "starts": [_start(start) for start in service.starts],
        "created_at": service.created_at,
    }


def render_served(snapshot: ServiceSnapshot, base: str | None, before: Service | None) -> ServedView:
    """`before`: the service before the change; None if there was none."""
    is_new = before is not None and before.newest != snapshot.service.newest
    because = snapshot.releases[snapshot.service.newest].because if is_new else ""
    return {**render_service(snapshot, base), "because": because}


def render_service_detail(
    snapshot: ServiceSnapshot,
    base: str | None,
    releases: list[Release],
    load: Sample | None,
    waits: Mapping[str, str],
) -> ServiceDetailView:
    """`waits`: the reason for each waiting replica."""
    return {
        **render_service(snapshot, base),
        "load": _load(load) if load is not None else None,
        "failure": _failure(snapshot.service),
        "resizes": [
            {"at": resize.at, "replicas": resize.replicas, "because": resize.because}
            for resize in snapshot.service.resizes
        ],
        "servers": [_replica(server, waits.get(server[0].replica_id, "")) for server in snapshot.replicas],
        "releases": [
            {
                "number": release.number,
                "model": release.model,
                "created_at": release.created_at,
                "by": release.by,
                "because": release.because,
            }
            for release in releases
        ],
        "spec": msgspec.json.decode(snapshot.releases[snapshot.service.newest].spec_json),
    }


def _failure(service: Service) -> FailureView | None:
    if not service.failed_ref:
        return None
    return {"ref": service.failed_ref, "at": service.failed_at, "because": service.failed_because}


def _load(load: Sample) -> LoadView:
    return {"in_flight": load.in_flight, "queued": load.queued, "rps": load.requests}


def _rollout(rollout: Rollout) -> RolloutView:
    return {
        "old": rollout.old,
        "new": rollout.new,
        "stage": rollout.stage.value,
        "step": rollout.step,
        "share": rollout.share,
        "since": rollout.since,
        "because": rollout.because,
        "waits": rollout.waits if rollout.is_open else "",
    }


def _replica(server: ReplicaRecord, waits: str) -> ReplicaView:
    replica, job, attempt = server
    state = attempt.state.value if job.is_open else str(job.outcome)
    if is_serving(replica, job, attempt):
        state = "draining" if replica.draining_at is not None else "ready"
    elif replica.is_asleep and attempt.state is AttemptState.RUNNING:
        state = "asleep"
    return {
        "job_id": job.job_id,
        "ref": job.reference,
        "release": replica.release,
        "slot": replica.slot,
        "state": state,
        "nodes": list(attempt.node_names),
        "address": replica.address if replica.attempt_id == attempt.attempt_id else "",
        "because": replica.because or job.because or waits,
        "started_at": attempt.started_at,
        "cold_start_s": None if replica.start is None else replica.start.total_s,
        "start": None if replica.start is None else _start(replica.start),
    }


def _start(start: ReplicaStart) -> StartView:
    return {"queued_s": start.queued_s, "starting_s": start.starting_s, "loading_s": start.loading_s}
