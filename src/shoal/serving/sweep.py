"""Once a second over everything that has a deadline: cheaper than a timer for each request."""

from __future__ import annotations

import asyncio
import contextlib
from time import monotonic

from shoal.serving.plane import DataPlane
from shoal.serving.replica import LiveReplica
from shoal.serving.upstream import connect

UPSTREAM_IDLE_S = 3.0
"""Many servers close connections idle for five seconds; a request must not meet that."""


def sweep(plane: DataPlane, now: float) -> None:
    for client in list(plane.clients):
        if now >= client.due or now >= client.body_due:
            client.sweep(now)
    for service in plane.services.values():
        service.sweep(now)
        for replica in service.replicas.values():
            _close_stale(replica, now)


def _close_stale(replica: LiveReplica, now: float) -> None:
    for up in list(replica.idle):
        if now - up.idle_since > UPSTREAM_IDLE_S:
            replica.idle.remove(up)
            up.close()


async def check(replica: LiveReplica) -> None:
    """Whether somebody listens again where nobody did."""
    with contextlib.suppress(OSError, ValueError):
        (await connect(replica)).close()
        replica.is_refusing = False
        replica.ejected_until = 0.0


async def keep_sweeping(plane: DataPlane) -> None:
    """Until cancelled."""
    while True:
        await asyncio.sleep(1.0)
        refusing = [
            replica
            for service in plane.services.values()
            for replica in service.replicas.values()
            if replica.is_refusing
        ]
        if refusing:
            await asyncio.wait([asyncio.ensure_future(check(replica)) for replica in refusing], timeout=1.0)
        sweep(plane, monotonic())
