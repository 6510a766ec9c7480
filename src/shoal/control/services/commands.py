"""Make a service or a new release of it, set how many replicas it may have, undo or promote a rollout, end
it.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any

import msgspec

from shoal.control.actor import Actor
from shoal.control.capabilities import JobAdmission, Records
from shoal.control.commands.submit import check_fit, check_mounts, check_priority, check_queue, check_secrets
from shoal.control.memory.planner_input import PlannerNodes
from shoal.control.project_tree import check_project_limits
from shoal.control.record import fingerprint, record_event, run_idempotent
from shoal.control.services.release_checks import (
    ModelChoice,
    check_data_plane,
    check_hosts,
    check_port,
    check_range,
    choose_model,
)
from shoal.control.services.replicas import frozen_replica, spec_of_release
from shoal.control.services.state import ServiceState
from shoal.errors import NotFound, ShoalError, StateError
from shoal.identity import seal_secrets
from shoal.model.people import User
from shoal.model.service import Release, Rollout, RolloutStage, Service
from shoal.settings import Settings
from shoal.spec.service import ServiceSpec
from shoal.spec.service_fields import ReplicaRange
from shoal.store import Tx
from shoal.wire import LeftBehind

ServiceEdit = Callable[[Service, float], Service]


class ServiceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A service as the API understood it."""

    spec: ServiceSpec
    project: str
    owner: User
    archive_digest: str | None = None
    left_behind: LeftBehind | None = None
    secrets: dict[str, str] = {}
    may_claim: bool = False
    """Whether the caller may claim hosts that no service has."""
    refusal: ShoalError | None = None
    """What the caller found missing. A repeated key gets its first reply nevertheless."""


async def serve(
    admission: JobAdmission, services: ServiceState, actor: Actor, request: ServiceRequest, key: str | None
) -> Service:
    """Make this spec the newest release of the service, and return the service once it is on disk. The same
    spec and archive again change nothing.

    Raise with nothing changed.
    """
    text = request.spec.canonical_json()
    check_secrets(frozen_replica(text).spec, request.secrets)
    refusal = request.refusal or _refusal(admission.planning.nodes, admission.settings, request.spec, text)
    secret = hmac.digest(
        admission.sealing.key, msgspec.json.encode(request.secrets, order="sorted"), "sha256"
    ).hex()
    digest = fingerprint("serve", request.project, text, request.archive_digest, secret)
    choice = ModelChoice(spec=request.spec, model="")
    try:
        choice = await choose_model(admission.records.store, admission.engine, request.project, request.spec)
    except ShoalError as error:
        refusal = refusal or error

    def change(tx: Tx) -> Service:
        now = admission.records.clock.now()

        def accept() -> str:
            if refusal is not None:
                raise refusal
            return _accept(admission, tx, actor, request, choice, now).service_id

        service_id, _ = run_idempotent(tx, actor, key, digest, now, str, accept)
        return find_service(tx, service_id)

    service = await admission.records.store.write(change)
    services.waker.set()
    return service


def _refusal(
    planner_nodes: PlannerNodes, settings: Settings, spec: ServiceSpec, text: str
) -> ShoalError | None:
    frozen = frozen_replica(text)
    try:
        check_data_plane(settings, spec)
        check_port(spec, (settings.port, settings.serve_port))
        check_queue(settings, frozen.spec)
        check_mounts(settings, frozen.spec)
        check_fit(planner_nodes, frozen)
    except ShoalError as error:
        return error
    return None


def _accept(
    admission: JobAdmission, tx: Tx, actor: Actor, request: ServiceRequest, choice: ModelChoice, now: float
) -> Service:
    project = tx.people.get_project(request.project)
    if project is None:
        raise NotFound(f"no project `{request.project}`", hint="shoal project list")
    spec, text = choice.spec, choice.spec.canonical_json()
    frozen = frozen_replica(text)
    priority = check_priority(admission.planning.planner, project, frozen.spec)
    check_project_limits(tx, project, frozen.request, f"a replica of `{spec.name}`")
    existing = tx.services.by_name(project.name, spec.name)
    if existing is not None and _is_same(tx, existing, text, request):
        return existing
    check_hosts(admission.settings, tx, project.name, spec, existing, may_claim=request.may_claim)
    because = _release_reason(tx, existing, choice.spec, request) if existing else ""
    service = (
        _with_next_release(existing, spec, now)
        if existing
        else _new_service(admission.records.new_id("svc"), request, now)
    )
    release = Release(
        service_id=service.service_id,
        number=service.newest,
        spec_json=text,
        archive_digest=request.archive_digest,
        left_behind=tx.left_behind.put(project.name, request.left_behind, now)
        if request.left_behind
        else None,
        priority=priority,
        model=choice.model,
        created_at=now,
        by=actor.name,
        owner=request.owner.user_id,
        owner_name=request.owner.name,
        because=because,
    )
    if existing is None:
        tx.services.add(service)
    else:
        tx.services.update(service)
    tx.services.add_release(release)
    if request.secrets:
        sealed = seal_secrets(
            admission.sealing.key, release.secrets_id, request.secrets, admission.sealing.random
        )
        tx.secrets.put(release.secrets_id, sealed)
    facts = {"service": service.name, "release": release.number, "spec": text, "model": release.model}
    facts |= {"because": because} if because else {}
    record_event(tx, "service.released", now, actor, project=service.project, data=facts)
    return service


def _is_same(tx: Tx, service: Service, text: str, request: ServiceRequest) -> bool:
    newest = tx.services.release(service.service_id, service.newest)
    is_wanted = service.rollout is None or service.rollout.stage is not RolloutStage.ROLLED_BACK
    same = newest is not None and (newest.spec_json, newest.archive_digest) == (text, request.archive_digest)
    return same and is_wanted and not request.secrets and service.stop_asked_by is None


def _release_reason(tx: Tx, service: Service, spec: ServiceSpec, request: ServiceRequest) -> str:
    """Return why this becomes a release, and which earlier `scale` it undoes."""
    newest = tx.services.release(service.service_id, service.newest)
    before = spec_of_release(newest.spec_json).canonical() if newest is not None else {}
    now = spec.canonical()
    fields = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    changed = [f"`{name}`" for name in fields]
    if newest is not None and newest.archive_digest != request.archive_digest:
        changed.append("working directory")
    reasons = [f"{', '.join(changed)} changed"] if changed else []
    if request.secrets:
        reasons.append("secrets were sent again")
    if service.rollout is not None and service.rollout.stage is RolloutStage.ROLLED_BACK and not reasons:
        reasons.append(f"release {service.rollout.new} was rolled back")
    asked_for = ReplicaRange(min=service.min_replicas, max=service.max_replicas)
    if asked_for != spec.replicas:
        reasons.append(f"replicas {_range_text(asked_for)} -> {_range_text(spec.replicas)}, as the file says")
    return "; ".join(reasons)


def _range_text(replicas: ReplicaRange) -> str:
    low, high = replicas.min, replicas.max
    return f"{low}" if low == high else f"{low}..{high}"


def _new_service(service_id: str, request: ServiceRequest, now: float) -> Service:
    spec = request.spec
    return Service(
        service_id=service_id,
        project=request.project,
        name=spec.name,
        owner=request.owner.user_id,
        owner_name=request.owner.name,
        min_replicas=spec.replicas.min,
        max_replicas=spec.replicas.max,
        replicas=spec.replicas.min,
        scaled_at=now,
        created_at=now,
    )


def _with_next_release(service: Service, spec: ServiceSpec, now: float) -> Service:
    """Return the service with one more release and the rollout to it. A rollout that was under way is given
    up.
    """
    if service.stop_asked_by is not None:
        raise StateError(
            f"service {service.reference} is being stopped by {service.stop_asked_by}",
            hint="wait until `shoal services` no longer lists it, then serve it again",
        )
    newest = service.newest + 1
    stage = RolloutStage(spec.rollout.strategy)
    low, high = spec.replicas.min, spec.replicas.max
    return msgspec.structs.replace(
        service,
        newest=newest,
        rollout=Rollout(
            old=service.live,
            new=newest,
            stage=stage,
            since=now,
            range_before=_range_before(service, low, high),
        ),
        min_replicas=low,
        max_replicas=high,
        replicas=min(max(service.replicas, low), high),
        failures=0,
        failed_ref="",
        failed_because="",
        version=service.version + 1,
    )


def _range_before(service: Service, low: int, high: int) -> tuple[int, int] | None:
    """Return the range that the service goes back to if its next release is rolled back. Never the range of a
    release that did not take over.
    """
    rollout = service.rollout
    if rollout is not None and rollout.is_open and rollout.range_before is not None:
        return rollout.range_before
    before = (service.min_replicas, service.max_replicas)
    return None if before == (low, high) else before


async def scale(
    records: Records,
    services: ServiceState,
    settings: Settings,
    actor: Actor,
    service_id: str,
    low: int,
    high: int,
    key: str | None,
) -> Service:
    """Bound the number of replicas from now on."""

    def change(service: Service, now: float) -> Service:
        check_range(settings, service.name, low, high)
        rollout = service.rollout
        if rollout is not None:
            rollout = msgspec.structs.replace(rollout, range_before=None)
        bounded = msgspec.structs.replace(
            service, min_replicas=low, max_replicas=high, scaled_at=now, rollout=rollout
        )
        count = min(max(service.replicas, low), high)
        if count == service.replicas:
            return bounded
        range_text = f"{low}" if low == high else f"{low} to {high}"
        return bounded.resized(count, f"{actor.name} says {range_text}", now)

    facts = {"min": low, "max": high}
    return await alter(records, services, actor, service_id, "service.scaled", facts, change, key)


async def stop(
    records: Records, services: ServiceState, actor: Actor, service_id: str, key: str | None
) -> Service:
    """End the service once its replicas have finished their requests. May be repeated."""

    def change(service: Service, now: float) -> Service:
        if service.stop_asked_by is not None:
            return service
        return msgspec.structs.replace(service, stop_asked_by=actor.name, rollout=None)

    return await alter(records, services, actor, service_id, "service.stop_asked", {}, change, key)


async def undo_rollout(
    records: Records, services: ServiceState, actor: Actor, service_id: str, key: str | None
) -> Service:
    """Give up the open rollout, or roll back to the release before the one that serves."""

    def change(service: Service, now: float) -> Service:
        rollout = service.rollout
        if rollout is not None and rollout.is_open:
            gone = f"undone by {actor.name}"
            over = msgspec.structs.replace(
                rollout, stage=RolloutStage.ROLLED_BACK, share=None, since=now, because=gone
            )
            return service.rolled_back(over, now)
        before = rollout.old if rollout is not None and rollout.stage is RolloutStage.DONE else service.live
        if before == service.live:
            raise StateError(
                f"service {service.reference} has no release before {service.live} to go back to",
                hint="change its file and `shoal serve` it",
            )
        back = Rollout(old=service.live, new=before, stage=RolloutStage.ROLLING, since=now)
        return msgspec.structs.replace(service, rollout=back, failures=0)

    return await alter(records, services, actor, service_id, "rollout.undone", {}, change, key)


async def promote_rollout(
    records: Records, services: ServiceState, actor: Actor, service_id: str, key: str | None
) -> Service:
    """Stop watching a canary: the new release takes over from here on."""

    def change(service: Service, now: float) -> Service:
        rollout = service.rollout
        if rollout is None or rollout.stage is not RolloutStage.CANARY:
            stage = "none" if rollout is None else str(rollout.stage)
            raise StateError(
                f"service {service.reference} has no canary to promote; its rollout is {stage}",
                hint=f"see `shoal services {service.reference}`",
            )
        over = msgspec.structs.replace(rollout, stage=RolloutStage.ROLLING, share=None, since=now)
        return msgspec.structs.replace(service, rollout=over)

    return await alter(records, services, actor, service_id, "rollout.promoted", {}, change, key)


async def alter(
    records: Records,
    services: ServiceState,
    actor: Actor,
    service_id: str,
    kind: str,
    facts: dict[str, Any],
    change: ServiceEdit,
    key: str | None,
) -> Service:
    """Record what `change` makes of the service, with its event. Record nothing if the service stays the
    same.
    """

    def write(tx: Tx) -> Service:
        now = records.clock.now()

        def act() -> str:
            before = find_service(tx, service_id)
            after = change(before, now)
            if after != before:
                tx.services.update(msgspec.structs.replace(after, version=before.version + 1))
                record_event(
                    tx, kind, now, actor, project=before.project, data={"service": before.name, **facts}
                )
            return service_id

        run_idempotent(tx, actor, key, fingerprint(kind, service_id, facts), now, str, act)
        return find_service(tx, service_id)

    changed = await records.store.write(write)
    services.waker.set()
    return changed


def find_service(tx: Tx, service_id: str) -> Service:
    service = tx.services.get(service_id)
    if service is None:
        raise NotFound("no such service, or one you may not see", hint="shoal services")
    return service
