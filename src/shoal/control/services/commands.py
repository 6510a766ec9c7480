"""Make a service or a new release of it, say how many replicas it may have, end it."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any

import msgspec

from shoal.control.actor import Actor
from shoal.control.core import Core
from shoal.control.once import fingerprint, once
from shoal.control.record import note
from shoal.control.services.abilities import check_data_plane, check_port, check_range
from shoal.control.services.hosts import check_hosts
from shoal.control.services.models import Chosen, choose
from shoal.control.services.replicas import frozen_replica, spec_of_release
from shoal.control.submit import check_fit, check_mounts, check_priority, check_queue, check_secrets
from shoal.control.tree import check_share
from shoal.errors import NotFound, ShoalError, StateError
from shoal.identity import seal_secrets
from shoal.model.people import User
from shoal.model.service import Release, Rollout, Service, Stage
from shoal.spec.service import ServiceSpec
from shoal.spec.service_clauses import ReplicaRange
from shoal.store import Tx
from shoal.wire import LeftBehind

AnyChange = Callable[[Service, float], Service]


class AskedService(msgspec.Struct, frozen=True, kw_only=True):
    """A service as the API understood it."""

    spec: ServiceSpec
    project: str
    owner: User
    archive_digest: str | None = None
    left_behind: LeftBehind | None = None
    secrets: dict[str, str] = {}
    may_claim: bool = False
    """Hosts that are nobody's yet."""
    refusal: ShoalError | None = None
    """What its sender found to be missing. A repeated key gets its first answer nevertheless."""


async def serve(core: Core, actor: Actor, asked: AskedService, key: str | None) -> Service:
    """The service with this spec as its newest release, on disk. The same spec and archive again change
    nothing.

    Raises with nothing changed.
    """
    text = asked.spec.canonical_json()
    check_secrets(frozen_replica(text).spec, asked.secrets)
    refusal = asked.refusal or _refusal(core, asked.spec, text)
    secret = hmac.digest(core.key, msgspec.json.encode(asked.secrets, order="sorted"), "sha256").hex()
    said = fingerprint("serve", asked.project, text, asked.archive_digest, secret)
    chosen = Chosen(spec=asked.spec, model="")
    try:
        chosen = await choose(core, asked.project, asked.spec)
    except ShoalError as error:
        refusal = refusal or error

    def change(tx: Tx) -> Service:
        now = core.clock.now()

        def accept() -> str:
            if refusal is not None:
                raise refusal
            return _accept(core, tx, actor, asked, chosen, now).service_id

        service_id, _ = once(tx, actor, key, said, now, str, accept)
        return find(tx, service_id)

    made = await core.store.write(change)
    core.services.waker.set()
    return made


def _refusal(core: Core, spec: ServiceSpec, text: str) -> ShoalError | None:
    frozen = frozen_replica(text)
    try:
        check_data_plane(core.settings, spec)
        check_port(spec, (core.settings.port, core.settings.serve_port))
        check_queue(core, frozen.spec)
        check_mounts(core, frozen.spec)
        check_fit(core, frozen)
    except ShoalError as error:
        return error
    return None


def _accept(core: Core, tx: Tx, actor: Actor, asked: AskedService, chosen: Chosen, now: float) -> Service:
    project = tx.people.get_project(asked.project)
    if project is None:
        raise NotFound(f"no project `{asked.project}`", hint="shoal project list")
    spec, text = chosen.spec, chosen.spec.canonical_json()
    frozen = frozen_replica(text)
    priority = check_priority(core, project, frozen.spec)
    check_share(tx, project, frozen.request, f"a replica of `{spec.name}`")
    known = tx.services.by_name(project.name, spec.name)
    if known is not None and _is_same(tx, known, text, asked):
        return known
    check_hosts(core, tx, project.name, spec, known, may_claim=asked.may_claim)
    because = _what_is_new(tx, known, chosen.spec, asked) if known else ""
    service = _renewed(known, spec, now) if known else _first(core.new_id("svc"), asked, now)
    release = Release(
        service_id=service.service_id,
        number=service.newest,
        spec_json=text,
        archive_digest=asked.archive_digest,
        left_behind=tx.left_behind.put(project.name, asked.left_behind, now) if asked.left_behind else None,
        priority=priority,
        model=chosen.model,
        created_at=now,
        by=actor.name,
        owner=asked.owner.user_id,
        owner_name=asked.owner.name,
        because=because,
    )
    if known is None:
        tx.services.add(service)
    else:
        tx.services.update(service)
    tx.services.add_release(release)
    if asked.secrets:
        sealed = seal_secrets(core.key, release.secrets_id, asked.secrets, core.random)
        tx.secrets.put(release.secrets_id, sealed)
    told = {"service": service.name, "release": release.number, "spec": text, "model": release.model}
    told |= {"because": because} if because else {}
    note(tx, "service.released", now, actor, project=service.project, data=told)
    return service


def _is_same(tx: Tx, known: Service, text: str, asked: AskedService) -> bool:
    newest = tx.services.release(known.service_id, known.newest)
    is_wanted = known.rollout is None or known.rollout.stage is not Stage.ROLLED_BACK
    same = newest is not None and (newest.spec_json, newest.archive_digest) == (text, asked.archive_digest)
    return same and is_wanted and not asked.secrets and known.stop_asked_by is None


def _what_is_new(tx: Tx, known: Service, spec: ServiceSpec, asked: AskedService) -> str:
    """Why this becomes a release, and what `scale` had said that it undoes."""
    newest = tx.services.release(known.service_id, known.newest)
    before = spec_of_release(newest.spec_json).canonical() if newest is not None else {}
    now = spec.canonical()
    fields = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    changed = [f"`{name}`" for name in fields]
    if newest is not None and newest.archive_digest != asked.archive_digest:
        changed.append("working directory")
    told = [f"{', '.join(changed)} changed"] if changed else []
    if asked.secrets:
        told.append("secrets given anew")
    if known.rollout is not None and known.rollout.stage is Stage.ROLLED_BACK and not told:
        told.append(f"release {known.rollout.new} was rolled back")
    asked_for = ReplicaRange(min=known.min_replicas, max=known.max_replicas)
    if asked_for != spec.replicas:
        told.append(f"replicas {_range(asked_for)} -> {_range(spec.replicas)}, as the file says")
    return "; ".join(told)


def _range(replicas: ReplicaRange) -> str:
    low, high = replicas.min, replicas.max
    return f"{low}" if low == high else f"{low}..{high}"


def _first(service_id: str, asked: AskedService, now: float) -> Service:
    spec = asked.spec
    return Service(
        service_id=service_id,
        project=asked.project,
        name=spec.name,
        owner=asked.owner.user_id,
        owner_name=asked.owner.name,
        min_replicas=spec.replicas.min,
        max_replicas=spec.replicas.max,
        replicas=spec.replicas.min,
        scaled_at=now,
        created_at=now,
    )


def _renewed(known: Service, spec: ServiceSpec, now: float) -> Service:
    """With one release more, and the way to it begun. One that was under way is given up for it."""
    if known.stop_asked_by is not None:
        raise StateError(
            f"service {known.reference} is being stopped by {known.stop_asked_by}",
            hint="wait until `shoal services` lists it no more, then serve it again",
        )
    newest = known.newest + 1
    stage = Stage(spec.rollout.strategy)
    low, high = spec.replicas.min, spec.replicas.max
    return msgspec.structs.replace(
        known,
        newest=newest,
        rollout=Rollout(
            old=known.live, new=newest, stage=stage, since=now, range_before=_range_before(known, low, high)
        ),
        min_replicas=low,
        max_replicas=high,
        replicas=min(max(known.replicas, low), high),
        failures=0,
        failed_ref="",
        failed_because="",
        version=known.version + 1,
    )


def _range_before(known: Service, low: int, high: int) -> tuple[int, int] | None:
    """What the service goes back to if its next release is taken back: not to one that never took over."""
    rollout = known.rollout
    if rollout is not None and rollout.is_open and rollout.range_before is not None:
        return rollout.range_before
    before = (known.min_replicas, known.max_replicas)
    return None if before == (low, high) else before


async def scale(core: Core, actor: Actor, service_id: str, low: int, high: int, key: str | None) -> Service:
    """Between so many and so many replicas from now on."""

    def change(service: Service, now: float) -> Service:
        check_range(core.settings, service.name, low, high)
        rollout = service.rollout
        if rollout is not None:
            rollout = msgspec.structs.replace(rollout, range_before=None)
        bounded = msgspec.structs.replace(
            service, min_replicas=low, max_replicas=high, scaled_at=now, rollout=rollout
        )
        count = min(max(service.replicas, low), high)
        if count == service.replicas:
            return bounded
        said = f"{low}" if low == high else f"{low} to {high}"
        return bounded.resized(count, f"{actor.name} says {said}", now)

    told = {"min": low, "max": high}
    return await alter(core, actor, service_id, "service.scaled", told, change, key)


async def stop(core: Core, actor: Actor, service_id: str, key: str | None) -> Service:
    """Its replicas finish what they have, and then it is gone. May be repeated."""

    def change(service: Service, now: float) -> Service:
        if service.stop_asked_by is not None:
            return service
        return msgspec.structs.replace(service, stop_asked_by=actor.name, rollout=None)

    return await alter(core, actor, service_id, "service.stop_asked", {}, change, key)


async def undo(core: Core, actor: Actor, service_id: str, key: str | None) -> Service:
    """Give up the rollout that is open, or roll back over to the release before the one that serves."""

    def change(service: Service, now: float) -> Service:
        rollout = service.rollout
        if rollout is not None and rollout.is_open:
            gone = f"undone by {actor.name}"
            over = msgspec.structs.replace(
                rollout, stage=Stage.ROLLED_BACK, share=None, since=now, because=gone
            )
            return service.taken_back(over, now)
        before = rollout.old if rollout is not None and rollout.stage is Stage.DONE else service.live
        if before == service.live:
            raise StateError(
                f"service {service.reference} has no release before {service.live} to go back to",
                hint="change its file and `shoal serve` it",
            )
        back = Rollout(old=service.live, new=before, stage=Stage.ROLLING, since=now)
        return msgspec.structs.replace(service, rollout=back, failures=0)

    return await alter(core, actor, service_id, "rollout.undone", {}, change, key)


async def promote(core: Core, actor: Actor, service_id: str, key: str | None) -> Service:
    """Watch a canary no longer: the new release takes over from here on."""

    def change(service: Service, now: float) -> Service:
        rollout = service.rollout
        if rollout is None or rollout.stage is not Stage.CANARY:
            stage = "none" if rollout is None else str(rollout.stage)
            raise StateError(
                f"service {service.reference} has no canary to promote; its rollout is {stage}",
                hint=f"see `shoal services {service.reference}`",
            )
        over = msgspec.structs.replace(rollout, stage=Stage.ROLLING, share=None, since=now)
        return msgspec.structs.replace(service, rollout=over)

    return await alter(core, actor, service_id, "rollout.promoted", {}, change, key)


async def alter(
    core: Core,
    actor: Actor,
    service_id: str,
    kind: str,
    told: dict[str, Any],
    change: AnyChange,
    key: str | None,
) -> Service:
    """Record what `change` makes of the service, with its event; nothing where that is the same."""

    def write(tx: Tx) -> Service:
        now = core.clock.now()

        def act() -> str:
            before = find(tx, service_id)
            after = change(before, now)
            if after != before:
                tx.services.update(msgspec.structs.replace(after, version=before.version + 1))
                note(tx, kind, now, actor, project=before.project, data={"service": before.name, **told})
            return service_id

        once(tx, actor, key, fingerprint(kind, service_id, told), now, str, act)
        return find(tx, service_id)

    changed = await core.store.write(write)
    core.services.waker.set()
    return changed


def find(tx: Tx, service_id: str) -> Service:
    service = tx.services.get(service_id)
    if service is None:
        raise NotFound("no such service, or one you may not see", hint="shoal services")
    return service
