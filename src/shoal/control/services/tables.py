"""The table that data planes serve by, made from what is recorded. Its version counts with the log's.

So it grows across restarts of the control plane, without being kept; should it not, as with a store restored
from a backup, another epoch says that it is another history.
"""

from __future__ import annotations

from collections import Counter

import anyio
import msgspec
import structlog

from shoal.control.core import Core
from shoal.control.services.hosts import granted
from shoal.control.services.look import Look, load
from shoal.errors import StoreUnavailable
from shoal.identity import is_at_least, replica_secret, user_caller
from shoal.model.people import Membership, Role
from shoal.model.service import Service, is_serving
from shoal.porch import SCHEME, name_of
from shoal.serving import table as told
from shoal.spec.service import ServiceSpec
from shoal.store import Tx

log = structlog.get_logger()

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
SPREAD_S = 1.0
"""So long an answer waits for data planes that do not say that they know: one has ended, or is busy."""
FAILING = 3
"""Replicas that failed in a row, none of which served for a minute: one more will hardly be ready."""
ROOM = 1024
"""Versions for each event."""


async def publish(core: Core) -> None:
    """Make the table anew, and tell of it if anything in it has changed."""
    book = core.services
    async with book.publishing:
        fresh = await core.store.read(lambda tx: make(core, tx))
        is_same = (fresh.services, fresh.papers) == (book.table.services, book.table.papers)
        if is_same and book.table.version > 0:
            return
        # The end of a token is no event: then the next number is taken, for which each event leaves room.
        version, epoch = max(fresh.version, book.table.version + 1), book.table.epoch or core.random(8).hex()
        book.publish(msgspec.structs.replace(fresh, version=version, epoch=epoch))


async def spread(core: Core) -> bool:
    """Who may call has changed: return when all data planes go by it, or False after `SPREAD_S`.

    What was recorded stays so whatever happens here: the next turn tells of it again.
    """
    try:
        if not await core.store.read(lambda tx: tx.services.all()):
            return True
        with anyio.move_on_after(SPREAD_S):
            await publish(core)
            await core.services.taken(core.clock)
            return True
    except StoreUnavailable as error:
        log.warning("table.late", because=error.message)
        return False
    except Exception:  # a fault of ours in making tables: the change is recorded, and answered as made
        log.exception("table.late", because="no table could be made")
        return False
    log.warning("table.late", because=f"not every data plane has confirmed it within {SPREAD_S:g} s")
    return False


def make(core: Core, tx: Tx) -> told.Table:
    found = [load(tx, service.service_id) for service in tx.services.all()]
    looks = [look for look in found if look is not None]
    people = _People(tx, core.clock.now()) if looks else None
    hosts = granted(core, [(look.service, look.spec(look.service.live)) for look in looks])
    served = [
        _service(core, look, people, hosts[look.service.service_id]) for look in looks if people is not None
    ]
    papers = core.porches.visitors() if core.porches is not None else None
    return told.Table(version=(tx.events.head().seq + 1) * ROOM, services=tuple(served), papers=papers)


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
        is_failing=service.failures >= FAILING,
        timeout_s=spec.timeout,
        retries=spec.retries,
        is_repeatable=spec.repeatable,
        hedge_s=spec.hedge_after or 0.0,
        affinity=spec.affinity or "",
        limits=_limits(spec),
        closed=frozenset() if spec.scale.sleep_after is None else MANAGING,
        is_off=service.max_replicas == 0,
        is_public=spec.public,
        origins=spec.origins,
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
            name=name_of(attempt.attempt_id) if replica.address.startswith(SCHEME) else "",
            is_draining=replica.draining_at is not None or look.service.is_asleep,
        )
        for replica, job, attempt in look.servers
        if is_serving(replica, job, attempt)
    ]


class _People:
    """Whose tokens are good where, read once for a table: by the same roles as in the API."""

    def __init__(self, tx: Tx, now: float) -> None:
        users = {user.user_id: user for user in tx.people.users() if user.is_active}
        held: dict[str, list[Membership]] = {}
        for member in tx.people.memberships():
            held.setdefault(member.user_id, []).append(member)
        self._known = [
            (token, user_caller(user, token, held.get(user.user_id, ())))
            for token in tx.tokens.all()
            if token.is_living(now) and (user := users.get(token.user_id)) is not None
        ]

    def callers(self, service: Service) -> tuple[told.Caller, ...]:
        """Everybody with a role in the project, by each of their tokens that reaches into it."""
        return tuple(
            told.Caller(
                digest=token.secret_hash.hex(),
                name=caller.name,
                project=service.project,
                expires_at=token.expires_at,
            )
            for token, caller in self._known
            if token.service in (None, service.name)
            and is_at_least(caller.role_in(service.project), Role.VIEWER)
        )
