"""Once a second over everything that has a deadline: cheaper than a timer for each request."""

from __future__ import annotations

import asyncio
from time import monotonic

from shoal.serving.plane import DataPlane
from shoal.serving.replica import LiveReplica

UPSTREAM_IDLE_S = 3.0
"""Many servers close connections idle for five seconds; a request must not meet that."""


def sweep(plane: DataPlane, now: float) -> None:
    for client in list(plane.clients):
        if now >= client.due or now >= client.body_due:
            client.sweep(now)
    if plane.clock.now() >= plane.routes.good_until:
        plane.admit_anew()
    for service in plane.services.values():
        service.sweep(now)
        for replica in service.replicas.values():
            _close_stale(replica, now)
    plane.forget_guesses(now)


def _close_stale(replica: LiveReplica, now: float) -> None:
    for up in list(replica.idle):
        if now - up.idle_since > UPSTREAM_IDLE_S:
            replica.idle.remove(up)
            up.close()


async def keep_sweeping(plane: DataPlane) -> None:
    """Until cancelled."""
    while True:
        await asyncio.sleep(1.0)
        sweep(plane, monotonic())
