"""Limits for one peer or one caller: wrong tokens, audit entries, open streams. Bounded memory.

Refused requests are part of the audit, at a rate that no client can flood, with a count of all. A refused
change is an entry of its own, before its answer is sent. Entries above the rate, refused reads, wrong tokens,
and requests for objects of other projects are only counted (`control.refusals`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, cast

import structlog
from starlette.types import Scope

from shoal.connection_quota import peer_of
from shoal.control import Actor
from shoal.control.capabilities import Records
from shoal.control.commands.audit import record_denied
from shoal.control.memory.refusals import Refusals
from shoal.errors import LimitReached, NotFound, NotVisible, ShoalError, StoreUnavailable
from shoal.identity import Caller, CallerKind

MAX_PEERS = 4096
PEOPLE_SHARE = 0.5
"""Part of the event streams that jobs cannot use."""
ALL_JOBS = "all jobs together"


class Bucket:
    """Token buckets by name: `burst` at once, then `per_s`. Forgets the names used longest ago."""

    def __init__(self, burst: int, per_s: float, monotonic: Callable[[], float]) -> None:
        self._burst = burst
        self._per_s = per_s
        self._monotonic = monotonic
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, name: str) -> bool:
        """Spend one. False if none is left."""
        now = self._monotonic()
        left, at = self._left.pop(name, (float(self._burst), now))
        left = min(float(self._burst), left + (now - at) * self._per_s)
        is_granted = left >= 1.0
        self._left[name] = (left - 1.0 if is_granted else left, now)
        if len(self._left) > MAX_PEERS:
            self._left.popitem(last=False)
        return is_granted


class StreamSlots:
    """Counts open event streams: in all, of each person, and of all jobs of a project or an owner.

    A job's token is a caller of its own, so jobs are counted by project and by owner. All jobs together hold
    at most half of the streams; the other half is for people.
    """

    def __init__(self, max_total: int, max_per_account: int) -> None:
        self._max_total = max_total
        self._max_of_jobs = max(int(max_total * (1 - PEOPLE_SHARE)), 1)
        self._max_per_account = max_per_account
        self._open: Counter[str] = Counter()
        self._total = 0

    @contextmanager
    def held(self, caller: Caller) -> Iterator[None]:
        """Hold one slot while the block runs. Raises `LimitReached`."""
        names = _counted_as(caller)
        self._check(names)
        self._open.update(names)
        self._total += 1
        try:
            yield
        finally:
            self._total -= 1
            self._open.subtract(names)
            for name in names:
                if not self._open[name]:
                    del self._open[name]

    def _check(self, names: tuple[str, ...]) -> None:
        limits = {name: self._max_of_jobs if name == ALL_JOBS else self._max_per_account for name in names}
        counts = [(f"of {name}", self._open[name], limit) for name, limit in limits.items()]
        for whose, count, limit in (*counts, ("in all", self._total, self._max_total)):
            if count >= limit:
                raise LimitReached(
                    f"{count} streams {whose} are open; at most {limit} are allowed",
                    hint="close one and try again",
                )


def _counted_as(caller: Caller) -> tuple[str, ...]:
    if caller.kind is not CallerKind.JOB:
        return (f"{caller.kind} {caller.name}",)
    return (f"jobs of project {caller.project}", f"jobs of owner {caller.owner}", ALL_JOBS)


def account_of(caller: Caller) -> str:
    """The account that the connections and reads of a token count against. All jobs of one owner share an
    account.
    """
    return f"jobs of owner {caller.owner}" if caller.kind is CallerKind.JOB else f"{caller.kind} {caller.id}"


def is_machine(caller: Caller) -> bool:
    """Whether the token belongs to a part of Shoal: a supervisor or a data plane."""
    return caller.kind not in (CallerKind.USER, CallerKind.JOB)


SCOPE_KEY = "shoal.call"
"""Where the guard puts the call into an ASGI scope."""
BURST = 20
PER_S = 0.2
STRANGERS_BURST = 100
STRANGERS_PER_S = 1.0
"""For all addresses with wrong tokens together, because one sender may have any number of addresses."""
READS = ("GET", "HEAD", "OPTIONS")
MAX_PATH = 200

log = structlog.get_logger()


class HasCaller(Protocol):
    caller: Caller

    @property
    def actor(self) -> Actor: ...


class Denials:
    """Writes `access.denied` entries: `BURST` at once and then one in `1 / PER_S` seconds for each account or
    address, and a bounded number for all addresses together. Counts the others.
    """

    def __init__(self, records: Records, refusals: Refusals) -> None:
        self._records = records
        self._refusals = refusals
        self._rate = Bucket(BURST, PER_S, records.clock.monotonic)
        self._rate_of_strangers = Bucket(STRANGERS_BURST, STRANGERS_PER_S, records.clock.monotonic)

    async def note(self, scope: Scope, error: ShoalError, request_id: str) -> None:
        """Record the request if it was refused for its sender, or for what the sender may not see."""
        call = cast("HasCaller | None", scope.get(SCOPE_KEY))
        is_unknown = call is None and error.status in (401, 429)  # 429: after many wrong tokens
        is_denied = call is not None and error.status in (401, 403)
        is_missing = call is not None and isinstance(error, NotFound)
        actor = _actor(scope, request_id) if is_unknown or is_denied or is_missing else None
        if actor is None:
            return
        method, path = str(scope["method"]), str(scope["path"])[:MAX_PATH]
        is_change = error.status in (401, 403) and method not in READS
        if is_change and self._take(call, actor):
            await self._write(actor, method, path, error, request_id)
            return
        is_elsewhere = isinstance(error, NotVisible)
        route = f"{method} {_route(scope)} {error.status}"
        is_nowhere = is_missing and not is_elsewhere
        self._refusals.count(actor, route, path, is_elsewhere=is_elsewhere, is_nowhere=is_nowhere)

    def _take(self, call: HasCaller | None, actor: Actor) -> bool:
        """Whether the refused request gets an entry of its own."""
        if call is not None:
            return self._rate.take(account_of(call.caller))
        return self._rate.take(f"{actor.kind} {actor.id}") and self._rate_of_strangers.take(actor.kind)

    async def _write(self, actor: Actor, method: str, path: str, error: ShoalError, request_id: str) -> None:
        facts = {"method": method, "path": path, "status": error.status, "code": error.code}
        try:
            await record_denied(self._records, actor, f"{method} {path}", facts)
        except StoreUnavailable:
            log.warning("audit.lost", request_id=request_id, **facts)


def _route(scope: Scope) -> str:
    """The route as it is declared, so that there are few; or its path, if no route matched."""
    if scope.get(SCOPE_KEY) is None:
        return "any"
    return str(getattr(scope.get("route"), "path", scope["path"]))


def _actor(scope: Scope, request_id: str) -> Actor | None:
    """The refused caller, or the address that a wrong token came from. None without any token."""
    call = cast("HasCaller | None", scope.get(SCOPE_KEY))
    if call is not None:
        return call.actor
    if any(name == b"authorization" for name, _ in scope["headers"]):
        peer = peer_of(scope.get("client"))
        return Actor(kind="unknown", id=peer, name=peer, request_id=request_id)
    return None
