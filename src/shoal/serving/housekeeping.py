"""Periodic work of a data plane: enforce deadlines and check replicas.

A sweep over all deadlines once a second is cheaper than a timer for each request. A fault in one of them is
logged with its traceback and ends at most that connection; the sweep goes on and the process serves on.

An active check asks a replica on a connection of its own. A replica that refuses connections is checked
every second until it accepts one. The others are checked every `CHECK_EVERY_TURNS` seconds, if the service
names a path.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from functools import partial
from time import monotonic

from shoal.serving.balance.replica import LiveReplica
from shoal.serving.balance.service import LiveService
from shoal.serving.plane import DataPlane
from shoal.serving.processes import is_local_error
from shoal.serving.proxy.downstream import Downstream
from shoal.serving.proxy.reply import ProxyReply
from shoal.serving.proxy.upstream import connect

SWEEP_INTERVAL_S = 1.0
UPSTREAM_IDLE_S = 3.0
"""Many servers close a connection that is idle for 5 s. A request must not be sent on such a connection."""


MAX_FAULTS_LOGGED = 10
"""Faults logged with tracebacks in one minute of sweeps. Further faults are only counted."""
MINUTE_S = 60.0

log = logging.getLogger(__name__)


class SweepFaults:
    """Logs what went wrong in sweeps, at a limited rate."""

    def __init__(self) -> None:
        self._since = 0.0
        self._num_logged = 0
        self._num_suppressed = 0

    def guard(self, now: float, subject: str, step: Callable[[], None]) -> bool:
        """Run the step. Return False if it failed; the failure is logged or counted."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other deadlines still count
            self._log(now, subject, error)
            return False
        return True

    def _log(self, now: float, subject: str, error: Exception) -> None:
        if now - self._since >= MINUTE_S:
            if self._num_suppressed:
                log.error("%d more faults while sweeping in the minute before", self._num_suppressed)
            self._since, self._num_logged, self._num_suppressed = now, 0, 0
        if self._num_logged < MAX_FAULTS_LOGGED:
            self._num_logged += 1
            log.error("a fault while sweeping %s; serving goes on", subject, exc_info=error)
        else:
            self._num_suppressed += 1


def sweep(plane: DataPlane, now: float, faults: SweepFaults | None = None) -> None:
    faults = faults or SweepFaults()
    for client in list(plane.clients):
        if now >= client.due or now >= client.body_due:
            _sweep_client(client, now, faults)
    if plane.clock.now() >= plane.routes.good_until:
        faults.guard(now, "tokens", plane.refresh_admission)
    for (project, name), service in list(plane.services.items()):
        faults.guard(now, f"service `{project}/{name}`", partial(_sweep_service, service, now))
    plane.forget_guesses(now)


def _sweep_client(client: Downstream, now: float, faults: SweepFaults) -> None:
    """Sweep a connection. If that fails, its deadlines no longer work, so abort it."""
    if not faults.guard(now, f"a connection of {client.peer}", partial(client.sweep, now)):
        faults.guard(now, f"the end of a connection of {client.peer}", client.abort)


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
    """Run until cancelled."""
    faults = SweepFaults()
    while True:
        await asyncio.sleep(SWEEP_INTERVAL_S)
        sweep(plane, monotonic(), faults)


CHECK_EVERY_TURNS = 5
MAX_FAILED = 2
"""Consecutive failed checks that take a replica out."""
ANSWER_S = 5.0
UNKNOWN = -1


class StatusProbe:
    """A reply handler that only reads the status; 0 means that no reply came."""

    is_head = False
    is_upgrade = False
    is_whole = False
    """False, so that the connection is never given to a request; `status_of` closes it."""

    def __init__(self) -> None:
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def on_reply(self, reply: ProxyReply, body: bytes) -> None:
        self._set_status(reply.status)

    def on_data(self, data: bytes, num_chunks: int = 1) -> None: ...

    def on_end(self) -> None: ...

    def on_lost(self, reason: str) -> None:
        self._set_status(0)

    def on_stalled(self) -> None: ...

    def on_resumed(self) -> None: ...

    def _set_status(self, status: int) -> None:
        if not self.status.done():
            self.status.set_result(status)


async def status_of(replica: LiveReplica, path: str, client_tls: ssl.SSLContext | None = None) -> int:
    """Return the status of the reply at `path`, or 0 if there is none. Without a path, return 200 as soon as
    the replica accepts a connection. `UNKNOWN`: it could not be asked, for a reason on this side.
    """
    try:
        up = await connect(replica, client_tls)
    except (OSError, ValueError) as error:
        return UNKNOWN if is_local_error(error) else 0
    try:
        if not path:
            return 200
        probe = StatusProbe()
        head = f"GET {path} HTTP/1.1\r\nhost: shoal\r\nconnection: close\r\n".encode()
        up.send(probe, head + replica.secret_lines + b"\r\n")
        return await asyncio.wait_for(probe.status, ANSWER_S)
    except TimeoutError:
        return 0
    finally:
        up.close()


async def check_replica(
    service: LiveService, replica: LiveReplica, client_tls: ssl.SSLContext | None = None
) -> None:
    """Check once, and take the replica out or back in accordingly."""
    status = await status_of(replica, service.spec.check, client_tls)
    if status == UNKNOWN:
        return
    if 0 < status < 500:
        was_out = replica.is_refusing or replica.checks_failed >= MAX_FAILED
        replica.checks_failed = 0
        if was_out:
            replica.is_refusing = False
            replica.ejected_until = 0.0
            service.refresh(monotonic())
        return
    replica.checks_failed += 1
    if replica.checks_failed >= MAX_FAILED and not replica.is_refusing:
        replica.is_refusing = True
        service.refresh(monotonic())


async def keep_checking(plane: DataPlane) -> None:
    """Run until cancelled. A replica never has two checks at once."""
    running_checks: dict[int, asyncio.Task[None]] = {}
    turn = 0
    while True:
        await asyncio.sleep(1.0)
        turn += 1
        running_checks = {key: task for key, task in running_checks.items() if not task.done()}
        for service in list(plane.services.values()):
            is_due = bool(service.spec.check) and turn % CHECK_EVERY_TURNS == 0
            for replica in list(service.replicas.values()):
                wanted = is_due or replica.is_refusing
                if wanted and not replica.is_draining and id(replica) not in running_checks:
                    running_checks[id(replica)] = asyncio.ensure_future(
                        check_replica(service, replica, plane.client_tls)
                    )
