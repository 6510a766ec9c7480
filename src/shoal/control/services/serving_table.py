"""The table that data planes serve by, made from the records.

Its version grows with the event log, so it grows across restarts of the control plane without being stored.
If it ever does not, as with a store restored from a backup, another epoch says that it is another history.
"""

from __future__ import annotations

from collections import Counter

import anyio
import msgspec
import structlog

from shoal.control.capabilities import Sealing, Serving
from shoal.control.services.release_checks import granted_hosts
from shoal.control.services.snapshot import ServiceSnapshot, load_snapshot
from shoal.errors import StoreUnavailable
from shoal.identity import is_at_least, replica_secret, user_caller
from shoal.model.people import Membership, Role
from shoal.model.service import Service, is_serving
from shoal.serving.table import (
    AllowedCaller,
    Balance,
    CallerLimits,
    ReplicaConfig,
    ServiceConfig,
    ServingTable,
)
from shoal.sidecar_tls import SCHEME, sidecar_name
from shoal.spec.service import ServiceSpec
from shoal.store import Tx

log = structlog.get_logger()

MANAGEMENT_PATHS = frozenset(
    {
        "sleep",
        "wake_up",
        "is_sleeping",
        "pause",
        "resume",
        "is_paused",
        "collective_rpc",
        "reset_prefix_cache",
        "reset_mm_cache",
        "reset_encoder_cache",
        "server_info",
        "get_world_size",
        "init_weight_transfer_engine",
        "update_weights",
        "start_profile",
        "stop_profile",
    }
)
"""What servers that can be told to sleep let every caller do to them."""
CONFIRM_S = 1.0
"""How long a reply waits for data planes that do not confirm the table: one of them has ended, or is busy."""
FAILING_AFTER = 3
"""Replicas that failed in a row without serving for a minute. After that many, the next one will hardly
become ready.
"""
VERSIONS_PER_EVENT = 1024
"""Versions of the table for each event."""


async def publish(serving: Serving) -> None:
    """Make a new table, and publish it if anything in it has changed."""
    state = serving.services
    async with state.publishing:
        fresh = await serving.records.store.read(lambda tx: make_table(serving, tx))
        is_same = (fresh.services, fresh.tls_identity) == (state.table.services, state.table.tls_identity)
        if is_same and state.table.version > 0:
            return
        # The expiry of a token is no event. The table then takes the next number, for which each event leaves
        # room.
        version, epoch = (
            max(fresh.version, state.table.version + 1),
            state.table.epoch or serving.sealing.random(8).hex(),
        )
        state.publish(msgspec.structs.replace(fresh, version=version, epoch=epoch))


async def publish_and_wait(serving: Serving) -> bool:
    """Publish a change of who may call. Return True once all data planes use it, or False after `CONFIRM_S`.

    The change is recorded whatever happens here, and the next turn publishes it again.
    """
    try:
        if not await serving.records.store.read(lambda tx: tx.services.all()):
            return True
        with anyio.move_on_after(CONFIRM_S):
            await publish(serving)
            await serving.services.wait_until_applied(serving.records.clock)
            return True
    except StoreUnavailable as error:
        log.warning("table.late", because=error.message)
        return False
    except Exception:  # A fault of ours in making tables. The change is recorded, and the reply says so.
        log.exception("table.late", because="no table could be made")
        return False
    log.warning("table.late", because=f"not every data plane has confirmed it within {CONFIRM_S:g} s")
    return False


def make_table(serving: Serving, tx: Tx) -> ServingTable:
    loaded = [load_snapshot(tx, service.service_id) for service in tx.services.all()]
    snapshots = [snapshot for snapshot in loaded if snapshot is not None]
    callers = _Callers(tx, serving.records.clock.now()) if snapshots else None
    hosts = granted_hosts(
        serving.settings, [(snapshot.service, snapshot.spec(snapshot.service.live)) for snapshot in snapshots]
    )
    served = [
        _service(serving.sealing, snapshot, callers, hosts[snapshot.service.service_id])
        for snapshot in snapshots
        if callers is not None
    ]
    identity = (
        serving.services.sidecar_identities.for_data_planes()
        if serving.services.sidecar_identities is not None
        else None
    )
    return ServingTable(
        version=(tx.events.head().seq + 1) * VERSIONS_PER_EVENT, services=tuple(served), tls_identity=identity
    )


def _service(
    sealing: Sealing, snapshot: ServiceSnapshot, callers: _Callers, hosts: tuple[str, ...]
) -> ServiceConfig:
    service, spec = snapshot.service, snapshot.spec(snapshot.service.live)
    return ServiceConfig(
        project=service.project,
        name=service.name,
        hosts=hosts,
        replicas=tuple(_replicas(sealing, snapshot)),
        shares=_shares(snapshot),
        balance=Balance(spec.balance),
        check=spec.readiness.path,
        cap=spec.cap,
        queue_s=spec.max_wait,
        start_s=spec.max_wait + max(spec.readiness.within, service.cold_start_s),
        is_failing=service.failures >= FAILING_AFTER,
        timeout_s=spec.timeout,
        retries=spec.retries,
        is_repeatable=spec.repeatable,
        hedge_s=spec.hedge_after or 0.0,
        affinity=spec.affinity or "",
        limits=_limits(spec),
        closed=frozenset() if spec.scale.sleep_after is None else MANAGEMENT_PATHS,
        is_off=service.max_replicas == 0,
        is_public=spec.public,
        origins=spec.origins,
        callers=() if spec.public else callers.of_service(service),
    )


def _shares(snapshot: ServiceSnapshot) -> dict[int, float]:
    """Return the share of requests for each release. The releases other than the new one divide its rest by
    their replicas, because the rollout may have overtaken another one.
    """
    rollout = snapshot.service.rollout
    if rollout is None or not rollout.is_open or rollout.share is None:
        return {}
    others = Counter(
        server[0].release
        for server in snapshot.replicas
        if server[0].release != rollout.new and server[0].draining_at is None and is_serving(*server)
    ) or Counter([rollout.old])
    rest = 1.0 - rollout.share
    kept = {release: rest * (count / others.total()) for release, count in sorted(others.items())}
    return {**kept, rollout.new: rollout.share}


def _limits(spec: ServiceSpec) -> CallerLimits:
    return CallerLimits(rps=spec.limits.rps, concurrency=spec.limits.concurrency, per=spec.limits.per)


def _replicas(sealing: Sealing, snapshot: ServiceSnapshot) -> list[ReplicaConfig]:
    return [
        ReplicaConfig(
            replica_id=replica.replica_id,
            address=replica.address,
            release=replica.release,
            secret=replica_secret(sealing.key, attempt.attempt_id),
            name=sidecar_name(attempt.attempt_id) if replica.address.startswith(SCHEME) else "",
            is_draining=replica.draining_at is not None or snapshot.service.is_asleep,
        )
        for replica, job, attempt in snapshot.replicas
        if is_serving(replica, job, attempt)
    ]


class _Callers:
    """Living tokens and their callers, read once for a table, by the same roles as in the API."""

    def __init__(self, tx: Tx, now: float) -> None:
        users = {user.user_id: user for user in tx.people.users() if user.is_active}
        held: dict[str, list[Membership]] = {}
        for member in tx.people.memberships():
            held.setdefault(member.user_id, []).append(member)
        self._living_tokens = [
            (token, user_caller(user, token, held.get(user.user_id, ())))
            for token in tx.tokens.all()
            if token.is_living(now) and (user := users.get(token.user_id)) is not None
        ]

    def of_service(self, service: Service) -> tuple[AllowedCaller, ...]:
        """Return every caller with a role in the project, once for each token that reaches into it."""
        return tuple(
            AllowedCaller(
                digest=token.secret_hash.hex(),
                name=caller.name,
                project=service.project,
                expires_at=token.expires_at,
            )
            for token, caller in self._living_tokens
            if token.service in (None, service.name)
            and is_at_least(caller.role_in(service.project), Role.VIEWER)
        )
