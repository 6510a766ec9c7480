"""A standby control plane: it answers health checks with the leader's address, and takes over the lead."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Protocol

import anyio
import anyio.to_thread
import structlog

from shoal.api.http.server import make_server, url_of
from shoal.api.http.standby import LeaderStatus, StandbyApp
from shoal.control.bootstrap import HOME_ID, refuse_other_home
from shoal.control.opening import cluster_for, refuse_other_cluster
from shoal.errors import HomeMissing, StateError, StoreUnavailable
from shoal.settings import Settings
from shoal.store import LeaderRecord, LeadershipWatch

LEADER, STANDBY = "leader", "standby"
WAIT_S = 1.0
AGAIN_S = 1.0
"""Pause after a database that did not answer."""
LOOKS = 5
"""Attempts to read the leader's cluster: a new leader may not have recorded it yet."""

log = structlog.get_logger()


class OnReady(Protocol):
    def __call__(self, url: str, *, leader: str | None) -> None: ...


async def may_lead(settings: Settings) -> bool:
    """Whether a process that has just started may lead, because no control plane leads now.

    Raise `StateError` if this home cannot be used, or if the leader uses another cluster.
    """
    watch = LeadershipWatch(settings.store_url)
    try:
        if await anyio.to_thread.run_sync(_is_free, settings, watch, 0.01):
            return True
    finally:
        watch.close()
    await _check_same_cluster(settings)
    return False


async def stand_by(settings: Settings, listener: socket.socket, on_ready: OnReady) -> bool:
    """Wait until no control plane leads, and answer on `listener` meanwhile. Return False if told to end.

    A database or a directory that does not answer or is not mounted is waited for, too. Raise `StateError` if
    this control plane could never lead the database.
    """
    seat = _StandbyServer(settings, LeadershipWatch(settings.store_url), listener, on_ready)
    try:
        return await seat.wait()
    finally:
        seat.close()


async def _check_same_cluster(settings: Settings) -> None:
    """Raise `StateError` if the leader uses another cluster than this control plane."""
    cluster = cluster_for(settings)
    for left in reversed(range(LOOKS)):
        try:
            refuse_other_cluster(settings.state_dir, cluster)
            return
        except StateError:
            if not left:
                raise
        await anyio.sleep(AGAIN_S)


class _StandbyServer:
    def __init__(
        self,
        settings: Settings,
        standby: LeadershipWatch,
        listener: socket.socket,
        on_ready: OnReady,
    ) -> None:
        self._settings = settings
        self._standby = standby
        self._listener = listener
        self._status = LeaderStatus()
        self._last_lead: LeaderRecord | None = None
        self._is_free = False
        self._server = make_server(StandbyApp(settings, lambda: self._status), settings)
        self._server.on_ready = lambda: on_ready(url_of(settings, listener), leader=self._status.leader)

    async def wait(self) -> bool:
        with contextlib.suppress(StoreUnavailable):
            await anyio.to_thread.run_sync(self._read_leader)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch)
            await self._server.serve(sockets=[self._listener])
            tasks.cancel_scope.cancel()
        # A process that was asked to stop does not lead, even if the lead became free: both are being ended.
        return self._is_free and not self._server.is_asked_to_stop

    def close(self) -> None:
        self._standby.close()
        self._listener.close()

    async def _watch(self) -> None:
        """Wait until the lead is free, then end the server."""
        while not self._is_free:
            _reap()
            try:
                await anyio.to_thread.run_sync(self._poll)
            except (StoreUnavailable, HomeMissing, OSError) as error:
                if self._status.is_well:
                    log.warning("standby.sees_nothing", error=str(error))
                self._status = LeaderStatus(is_well=False)
                await anyio.sleep(AGAIN_S)
        self._server.should_exit = True

    def _poll(self) -> None:
        self._standby.announce(self._settings.url_for_supervisors)
        self._is_free = _is_free(self._settings, self._standby, WAIT_S)
        if not self._is_free:
            # Last: a standby that could not lead, for example without its directory, is unhealthy.
            self._read_leader()

    def _read_leader(self) -> None:
        lead = self._standby.leader()
        self._status = LeaderStatus(lead.url if lead else None)
        if lead is not None and lead != self._last_lead:
            log.info("standby.waits", term=lead.term, leader=lead.url, by=lead.by)
        self._last_lead = lead


def _is_free(settings: Settings, standby: LeadershipWatch, wait_s: float) -> bool:
    """Whether the lead can be taken now. Blocks for at most `wait_s`."""
    refuse_other_home(standby.meta(HOME_ID), settings.state_dir)
    return standby.wait(wait_s)


def _reap() -> None:
    """Reap processes that the previous program in this process had started."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
