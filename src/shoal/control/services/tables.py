"""The table that data planes serve by, made from what is recorded. Its version counts with the log's.

So it grows across restarts of the control plane, without being kept; should it not, as with a store restored
from a backup, another epoch says that it is another history.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from shoal.control.core import Core
from shoal.control.services.hosts import granted
from shoal.control.services.look import Look, is_serving, load
from shoal.identity import replica_secret
from shoal.model.people import Token
from shoal.model.service import Service
from shoal.serving import table as told
from shoal.spec.service import ServiceSpec
from shoal.store import Tx

MANAGING = frozenset(
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
"""What servers that can be told to sleep let everybody who reaches them do to them."""
ROOM = 1024
"""Versions for each event."""


async def publish(core: Core) -> None:
    """Make the table anew, and tell of it if anything in it has changed."""
    fresh = await core.store.read(lambda tx: make(core, tx))
    book = core.services
    if fresh.services == book.table.services and book.table.version > 0:
        return
    # The end of a token is no event: then the next number is taken, for which each event leaves room.
    version, epoch = max(fresh.version, book.table.version + 1), book.table.epoch or core.random(8).hex()
    book.publish(msgspec.structs.replace(fresh, version=version, epoch=epoch))


def make(core: Core, tx: Tx) -> told.Table:
    found = [load(tx, service.service_id) for service in tx.services.all()]
    looks = [look for look in found if look is not None]
    people = _People(tx, core.clock.now()) if looks else None
    hosts = granted(core, [(look.service, look.spec(look.service.live)) for look in looks])
    served = [
        _service(core, look, people, hosts[look.service.service_id]) for look in looks if people is not None
    ]
    return told.Table(version=(tx.events.head().seq + 1) * ROOM, services=tuple(served))


def _service(core: Core, look: Look, people: _People, hosts: tuple[str, ...]) -> told.Service:
    service, spec = look.service, look.spec(look.service.live)
    return told.Service(
        project=service.project,
        name=service.name,
        hosts=hosts,
        replicas=tuple(_replicas(core, look)),
        shares=_shares(look),
        balance=told.Balance(spec.balance),
        check=spec.readiness.path,
        cap=spec.cap,
        queue_s=spec.max_wait,
        start_s=spec.max_wait + max(spec.readiness.within, service.cold_start_s),
        timeout_s=spec.timeout,
        retries=spec.retries,
        is_repeatable=spec.repeatable,
        hedge_s=spec.hedge_after or 0.0,
        affinity=spec.affinity or "",
        limits=_limits(spec),
        closed=frozenset() if spec.scale.sleep_after is None else MANAGING,
        is_public=spec.public,
        callers=() if spec.public else people.callers(service),
    )


def _shares(look: Look) -> dict[int, float]:
    """What the new release does not get is for all others, by their replicas: one was overtaken, perhaps."""
    rollout = look.service.rollout
    if rollout is None or not rollout.is_open or rollout.share is None:
        return {}
    others = Counter(
        server[0].release
        for server in look.servers
        if server[0].release != rollout.new and server[0].draining_at is None and is_serving(*server)
    ) or Counter([rollout.old])
    rest = 1.0 - rollout.share
    kept = {release: rest * (count / others.total()) for release, count in sorted(others.items())}
    return {**kept, rollout.new: rollout.share}


def _limits(spec: ServiceSpec) -> told.Limits:
    return told.Limits(rps=spec.limits.rps, concurrency=spec.limits.concurrency, per=spec.limits.per)


def _replicas(core: Core, look: Look) -> list[told.Replica]:
    return [
        told.Replica(
            replica_id=replica.replica_id,
            address=replica.address,
            release=replica.release,
            secret=replica_secret(core.key, attempt.attempt_id),
            is_draining=replica.draining_at is not None or look.service.is_asleep,
        )
        for replica, job, attempt in look.servers
        if is_serving(replica, job, attempt)
    ]


class _People:
    """Whose tokens are good where, read once for a table."""

    def __init__(self, tx: Tx, now: float) -> None:
        self._users = {user.user_id: user for user in tx.people.users() if user.is_active}
        self._tokens = [token for token in tx.people.tokens() if _is_good(token, now)]
        self._members: dict[str, set[str]] = {}
        for member in tx.people.memberships():
            self._members.setdefault(member.project, set()).add(member.user_id)

    def callers(self, service: Service) -> tuple[told.Caller, ...]:
        """Everybody with a role in the project, by each of their tokens that reaches into it."""
        members = self._members.get(service.project, set())
        return tuple(
            told.Caller(
                digest=token.secret_hash.hex(),
                name=user.name,
                project=service.project,
                expires_at=token.expires_at,
            )
            for token in self._tokens
            if token.project in (None, service.project)
            and token.service in (None, service.name)
            and (user := self._users.get(token.user_id)) is not None
            and (user.cluster_role is not None or user.user_id in members)
        )


def _is_good(token: Token, now: float) -> bool:
    return token.revoked_at is None and (token.expires_at is None or token.expires_at > now)
