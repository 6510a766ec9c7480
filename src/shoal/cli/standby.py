"""A control plane that waits: it answers how it is and who leads, and leads once that one goes."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Protocol

import anyio
import anyio.to_thread
import structlog

from shoal.api.server import make_server, url_of
from shoal.api.standby import StandbyApp, Waiting
from shoal.control.elsewhere import cluster_for, refuse_another
from shoal.control.first import HOME_ID, refuse_strange_home
from shoal.errors import HomeMissing, StateError, StoreUnavailable
from shoal.settings import Settings
from shoal.store import Lead, Standby

LEADER, STANDBY = "leader", "standby"
WAIT_S = 1.0
AGAIN_S = 1.0
"""After a database that did not answer."""
LOOKS = 5
"""A leader that has just begun may not have written down yet where it hands its work to."""

log = structlog.get_logger()


class OnReady(Protocol):
    def __call__(self, url: str, *, leader: str | None) -> None: ...


async def may_lead(settings: Settings) -> bool:
    """Whether nobody leads now, for one that has just been started.

    `StateError`: not with this home, or not for the cluster that whoever leads hands work to.
    """
    one = Standby(settings.store_url)
    try:
        if await anyio.to_thread.run_sync(_is_free, settings, one, 0.01):
            return True
    finally:
        one.close()
    await _agree(settings)
    return False


async def stand_by(settings: Settings, listener: socket.socket, on_ready: OnReady) -> bool:
    """Wait until nobody leads, answering on `listener` meanwhile. False: told to end.

    A database or a directory that does not answer, or is not mounted, is waited for, too. `StateError`: the
    database is not one that this control plane could ever lead.
    """
    seat = _Seat(settings, Standby(settings.store_url), listener, on_ready)
    try:
        return await seat.wait()
    finally:
        seat.close()


async def _agree(settings: Settings) -> None:
    """`StateError` where whoever leads hands work to another cluster than this one would."""
    cluster = cluster_for(settings)
    for left in reversed(range(LOOKS)):
        try:
            refuse_another(settings.state_dir, cluster)
            return
        except StateError:
            if not left:
                raise
        await anyio.sleep(AGAIN_S)


class _Seat:
    def __init__(
        self,
        settings: Settings,
        standby: Standby,
        listener: socket.socket,
        on_ready: OnReady,
    ) -> None:
        self._settings = settings
        self._standby = standby
        self._listener = listener
        self._known = Waiting()
        self._told: Lead | None = None
        self._is_free = False
        self._server = make_server(StandbyApp(settings, lambda: self._known), settings)
        self._server.on_ready = lambda: on_ready(url_of(settings, listener), leader=self._known.leader)

    async def wait(self) -> bool:
        with contextlib.suppress(StoreUnavailable):
            await anyio.to_thread.run_sync(self._see_leader)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch)
            await self._server.serve(sockets=[self._listener])
            tasks.cancel_scope.cancel()
        # Who was asked to stop does not lead, though the lead got free meanwhile: both are being ended.
        return self._is_free and not self._server.is_asked_to_stop

    def close(self) -> None:
        self._standby.close()
        self._listener.close()

    async def _watch(self) -> None:
        """Until the lead is free; then the server ends."""
        while not self._is_free:
            _reap()
            try:
                await anyio.to_thread.run_sync(self._look)
            except (StoreUnavailable, HomeMissing, OSError) as error:
                if self._known.is_well:
                    log.warning("standby.sees_nothing", error=str(error))
                self._known = Waiting(is_well=False)
                await anyio.sleep(AGAIN_S)
        self._server.should_exit = True

    def _look(self) -> None:
        self._standby.meet(self._settings.url_for_supervisors)
        self._is_free = _is_free(self._settings, self._standby, WAIT_S)
        if not self._is_free:
            self._see_leader()  # last: who could not have the lead, its directory being away say, is not well

    def _see_leader(self) -> None:
        lead = self._standby.leader()
        self._known = Waiting(lead.url if lead else None)
        if lead is not None and lead != self._told:
            log.info("standby.waits", term=lead.term, leader=lead.url, by=lead.by)
        self._told = lead


def _is_free(settings: Settings, one: Standby, wait_s: float) -> bool:
    """Whether the lead could be had now. Blocks for at most `wait_s`."""
    refuse_strange_home(one.meta(HOME_ID), settings.state_dir)
    return one.wait(wait_s)


def _reap() -> None:
    """What the program before us in this process had started: nobody else asks how it ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
