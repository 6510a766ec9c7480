"""Once a second over everything that has a deadline: cheaper than a timer for each request.

A fault in one of them is told with its traceback, and ends that connection at most: the others are swept, and
the process serves on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from time import monotonic

from shoal.serving.downstream import Downstream
from shoal.serving.plane import DataPlane
from shoal.serving.replica import LiveReplica
from shoal.serving.service import LiveService

EVERY_S = 1.0
UPSTREAM_IDLE_S = 3.0
"""Many servers close connections idle for five seconds; a request must not meet that."""


MOST_TOLD = 10
"""Faults told with their tracebacks, in a minute of sweeps; the others are counted."""
MINUTE_S = 60.0

log = logging.getLogger(__name__)


class Faults:
    """What went wrong in sweeps: told, but not without end."""

    def __init__(self) -> None:
        self._since = 0.0
        self._told = 0
        self._untold = 0

    def within(self, now: float, what: str, step: Callable[[], None]) -> bool:
        """Take the step. False: it failed, and that was told or counted."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 - whatever it is: others have deadlines, too
            self._tell(now, what, error)
            return False
        return True

    def _tell(self, now: float, what: str, error: Exception) -> None:
        if now - self._since >= MINUTE_S:
            if self._untold:
                log.error("%d more faults while sweeping in the minute before", self._untold)
            self._since, self._told, self._untold = now, 0, 0
        if self._told < MOST_TOLD:
            self._told += 1
            log.error("a fault while sweeping %s; serving goes on", what, exc_info=error)
        else:
            self._untold += 1


def sweep(plane: DataPlane, now: float, faults: Faults | None = None) -> None:
    faults = faults or Faults()
    for client in list(plane.clients):
        if now >= client.due or now >= client.body_due:
            _sweep_client(client, now, faults)
    if plane.clock.now() >= plane.routes.good_until:
        faults.within(now, "tokens", plane.admit_anew)
    for (project, name), service in list(plane.services.items()):
        faults.within(now, f"service `{project}/{name}`", partial(_sweep_service, service, now))
    plane.forget_guesses(now)


def _sweep_client(client: Downstream, now: float, faults: Faults) -> None:
    """One that cannot be swept has no deadlines any more: its connection ends here."""
    if not faults.within(now, f"a connection of {client.peer}", partial(client.sweep, now)):
        faults.within(now, f"the end of a connection of {client.peer}", client.abort)


def _sweep_service(service: LiveService, now: float) -> None:
    service.sweep(now)
    for replica in service.replicas.values():
        _close_stale(replica, now)


def _close_stale(replica: LiveReplica, now: float) -> None:
    for up in list(replica.idle):
        if now - up.idle_since > UPSTREAM_IDLE_S:
            replica.idle.remove(up)
            up.close()


async def keep_sweeping(plane: DataPlane) -> None:
    """Until cancelled."""
    faults = Faults()
    while True:
        await asyncio.sleep(EVERY_S)
        sweep(plane, monotonic(), faults)
