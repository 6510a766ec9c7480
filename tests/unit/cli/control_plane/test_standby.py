"""A standby control plane: when it takes the lead, and when it was asked to stop."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
from typing import cast

import anyio
import pytest
from structlog.testing import capture_logs

from shoal.cli.control_plane import standby
from shoal.cli.control_plane.standby import _StandbyServer
from shoal.errors import StateError
from shoal.settings import Settings
from shoal.store import LeadershipWatch

pytestmark = pytest.mark.anyio


class Chair:
    """A leadership watch whose lead becomes free on command."""

    owner: str | None = None

    def __init__(self) -> None:
        self.is_free = threading.Event()
        self.is_waited_for = threading.Event()

    def wait(self, wait_s: float) -> bool:
        self.is_waited_for.set()
        return self.is_free.wait(wait_s)

    def leader(self) -> None:
        return None

    def announce(self, url: str) -> None:
        return

    def meta(self, name: str) -> str | None:
        return self.owner

    def close(self) -> None:
        return


@pytest.fixture
def chair(monkeypatch: pytest.MonkeyPatch) -> Chair:
    monkeypatch.setattr(standby, "refuse_other_home", lambda *_: None)
    return Chair()


def seat(chair: Chair, settings: Settings) -> _StandbyServer:
    listener = socket.create_server(("127.0.0.1", 0))
    return _StandbyServer(settings, cast("LeadershipWatch", chair), listener, lambda *_, **__: None)


async def test_standby_leads_when_the_lead_is_free(chair: Chair, settings: Settings) -> None:
    chair.is_free.set()
    with anyio.fail_after(60):
        assert await seat(chair, settings).wait()


async def test_shared_directory_that_is_missing_for_a_moment_is_waited_for(
    chair: Chair, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([OSError(errno.ESTALE, "Stale file handle")])

    def refuse(*_: object) -> None:
        if error := next(looks, None):
            raise error

    monkeypatch.setattr(standby, "refuse_other_home", refuse)
    monkeypatch.setattr(standby, "AGAIN_S", 0.0)
    chair.is_free.set()
    with anyio.fail_after(60):
        assert await seat(chair, settings).wait()


async def test_missing_shared_directory_is_logged_once_and_makes_the_standby_unhealthy(
    chair: Chair, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it was healthy each time it read the leader from the database, and it reported that."""
    looks = iter([OSError(errno.ESTALE, "Stale file handle")] * 5)
    statuses = []

    def refuse(*_: object) -> None:
        statuses.append(standby_server._status.is_well)
        if error := next(looks, None):
            raise error

    monkeypatch.setattr(standby, "refuse_other_home", refuse)
    monkeypatch.setattr(standby, "AGAIN_S", 0.0)
    chair.is_free.set()
    standby_server = seat(chair, settings)
    with anyio.fail_after(60), capture_logs() as logged:
        assert await standby_server.wait()
    assert statuses == [True, *[False] * 5]
    assert [line["event"] for line in logged].count("standby.sees_nothing") == 1


async def test_a_shared_directory_that_is_not_mounted_is_waited_for(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory looks like another one: it has no `home-id` and is empty."""
    chair, path = Chair(), settings.home / "home-id"
    chair.owner = "ab12"
    chair.is_free.set()
    standby_server = seat(chair, settings)
    monkeypatch.setattr(standby, "AGAIN_S", 0.01)

    async def mount() -> None:
        while standby_server._status.is_well:  # noqa: ASYNC110 - it belongs to another and signals nothing
            await anyio.sleep(0.01)
        assert not chair.is_waited_for.is_set(), "nor is the lead taken for it"
        path.write_text("ab12\n")

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(mount)
            assert await standby_server.wait()


async def test_a_shared_directory_of_another_database_is_not_waited_for(settings: Settings) -> None:
    chair = Chair()
    chair.owner = "ab12"
    (settings.home / "home-id").write_text("cd34\n")
    standby_server = seat(chair, settings)
    with anyio.fail_after(60), pytest.RaisesGroup(pytest.RaisesExc(StateError, match="belongs to another")):
        await standby_server.wait()
    standby_server.close()


async def test_stopping_standby_does_not_lead_when_the_lead_becomes_free(
    chair: Chair, settings: Settings
) -> None:
    """Both control planes are being stopped, the standby first."""

    def end_both() -> None:
        chair.is_waited_for.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        chair.is_free.set()

    standby_server = seat(chair, settings)
    standby_server._server.on_ready = threading.Thread(target=end_both).start
    with anyio.fail_after(60):
        assert not await standby_server.wait()


@pytest.fixture
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(home=tmp_path_factory.mktemp("home"))
