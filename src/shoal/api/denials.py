"""Refused attempts to change something are part of the audit, at a rate that nobody can flood."""

from __future__ import annotations

from typing import Protocol, cast

import structlog
from starlette.types import Scope

from shoal.api.limits import Bucket, peer_of
from shoal.control import Actor, ControlPlane
from shoal.errors import ShoalError, StoreUnavailable

SCOPE_KEY = "shoal.call"
"""Where the guard puts the call into an ASGI scope."""
BURST = 20
PER_S = 0.2
READS = ("GET", "HEAD", "OPTIONS")

log = structlog.get_logger()


class HasActor(Protocol):
    @property
    def actor(self) -> Actor: ...


class Denials:
    """Writes `access.denied` entries, `BURST` at once and then one in `1 / PER_S` seconds for each actor."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._rate = Bucket(BURST, PER_S, plane.core.clock.monotonic)

    async def note(self, scope: Scope, error: ShoalError, request_id: str) -> None:
        """Record it if it was refused for who asked, and would have changed something."""
        actor = _actor(scope, request_id)
        if error.status not in (401, 403) or scope["method"] in READS or actor is None:
            return
        if not self._rate.take(f"{actor.kind}:{actor.id}"):
            return
        path = scope["path"][:200]
        facts = {"method": scope["method"], "path": path, "status": error.status, "code": error.code}
        try:
            await self._plane.record_denied(actor, f"{scope['method']} {path}", facts)
        except StoreUnavailable:
            log.warning("audit.lost", request_id=request_id, **facts)


def _actor(scope: Scope, request_id: str) -> Actor | None:
    """Who was refused: the caller, or the address a wrong token came from; None without any token."""
    call = scope.get(SCOPE_KEY)
    if call is not None:
        return cast("HasActor", call).actor
    if any(name == b"authorization" for name, _ in scope["headers"]):
        peer = peer_of(scope.get("client"))
        return Actor(kind="unknown", id=peer, name=peer, request_id=request_id)
    return None
