"""Refused requests are part of the audit, at a rate that nobody can flood and with a count of all.

A refused change is an entry of its own, before its answer is out. What exceeds the rate, refused reads, wrong
tokens, and requests for things of other projects are counted (`control.refusals`).
"""

from __future__ import annotations

from typing import Protocol, cast

import structlog
from starlette.types import Scope

from shoal.api.limits import Bucket, account_of
from shoal.control import Actor, ControlPlane
from shoal.errors import NotFound, NotVisible, ShoalError, StoreUnavailable
from shoal.holders import peer_of
from shoal.identity import Caller

SCOPE_KEY = "shoal.call"
"""Where the guard puts the call into an ASGI scope."""
BURST = 20
PER_S = 0.2
STRANGERS_BURST = 100
STRANGERS_PER_S = 1.0
"""Of all addresses together that wrong tokens come from: one sender may have as many as it likes."""
READS = ("GET", "HEAD", "OPTIONS")
MAX_PATH = 200

log = structlog.get_logger()


class HasCaller(Protocol):
    caller: Caller

    @property
    def actor(self) -> Actor: ...


class Denials:
    """Writes `access.denied` entries, `BURST` at once and then one in `1 / PER_S` seconds for each account or
    address, and a bounded number for all addresses together. Counts the others.
    """

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._rate = Bucket(BURST, PER_S, plane.core.clock.monotonic)
        self._rate_of_strangers = Bucket(STRANGERS_BURST, STRANGERS_PER_S, plane.core.clock.monotonic)

    async def note(self, scope: Scope, error: ShoalError, request_id: str) -> None:
        """Record the request if it was refused for who sent it, or for what it may not see."""
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
        self._plane.core.refusals.count(actor, route, path, is_elsewhere=is_elsewhere, is_nowhere=is_nowhere)

    def _take(self, call: HasCaller | None, actor: Actor) -> bool:
        """Whether the refused request may have an entry of its own."""
        if call is not None:
            return self._rate.take(account_of(call.caller))
        return self._rate.take(f"{actor.kind} {actor.id}") and self._rate_of_strangers.take(actor.kind)

    async def _write(self, actor: Actor, method: str, path: str, error: ShoalError, request_id: str) -> None:
        facts = {"method": method, "path": path, "status": error.status, "code": error.code}
        try:
            await self._plane.record_denied(actor, f"{method} {path}", facts)
        except StoreUnavailable:
            log.warning("audit.lost", request_id=request_id, **facts)


def _route(scope: Scope) -> str:
    """The route as it is declared, so that there are few; its path, where that is all of it."""
    if scope.get(SCOPE_KEY) is None:
        return "any"
    return str(getattr(scope.get("route"), "path", scope["path"]))


def _actor(scope: Scope, request_id: str) -> Actor | None:
    """Who was refused: the caller, or the address a wrong token came from; None without any token."""
    call = cast("HasCaller | None", scope.get(SCOPE_KEY))
    if call is not None:
        return call.actor
    if any(name == b"authorization" for name, _ in scope["headers"]):
        peer = peer_of(scope.get("client"))
        return Actor(kind="unknown", id=peer, name=peer, request_id=request_id)
    return None
