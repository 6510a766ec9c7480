"""The seat of a control plane that stands by: who gets the lead, and who was asked to stop."""

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

from shoal.cli import standby
from shoal.cli.standby import _Seat
from shoal.errors import StateError
from shoal.settings import Settings
from shoal.store import Standby

pytestmark = pytest.mark.anyio


class Chair:
    """A lead that becomes free when it is told to."""

    owner: str | None = None

    def __init__(self) -> None:
        self.is_free = threading.Event()
        self.is_waited_for = threading.Event()

    def wait(self, wait_s: float) -> bool:
        self.is_waited_for.set()
        return self.is_free.wait(wait_s)

    def leader(self) -> None:
        return None

    def meet(self, url: str) -> None:
        return

    def meta(self, name: str) -> str | None:
        return self.owner

    def close(self) -> None:
        return


@pytest.fixture
def chair(monkeypatch: pytest.MonkeyPatch) -> Chair:
    monkeypatch.setattr(standby, "refuse_strange_home", lambda *_: None)
    return Chair()


def seat(chair: Chair, settings: Settings) -> _Seat:
    listener = socket.create_server(("127.0.0.1", 0))
    return _Seat(settings, cast("Standby", chair), listener, lambda *_, **__: None)


async def test_who_stands_by_leads_when_the_lead_is_free(chair: Chair, settings: Settings) -> None:
    chair.is_free.set()
    with anyio.fail_after(60):
        assert await seat(chair, settings).wait()


async def test_a_shared_directory_that_is_away_for_a_moment_is_waited_for(
    chair: Chair, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([OSError(errno.ESTALE, "Stale file handle")])

    def refuse(*_: object) -> None:
        if error := next(looks, None):
            raise error

    monkeypatch.setattr(standby, "refuse_strange_home", refuse)
    monkeypatch.setattr(standby, "AGAIN_S", 0.0)
    chair.is_free.set()
    with anyio.fail_after(60):
        assert await seat(chair, settings).wait()


async def test_a_shared_directory_that_stays_away_is_told_of_once_and_whoever_waits_for_it_is_not_well(
    chair: Chair, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was well at every other moment, having asked the database who leads, and told of it each time."""
    looks = iter([OSError(errno.ESTALE, "Stale file handle")] * 5)
    known = []

    def refuse(*_: object) -> None:
        known.append(own._known.is_well)
        if error := next(looks, None):
            raise error

    monkeypatch.setattr(standby, "refuse_strange_home", refuse)
    monkeypatch.setattr(standby, "AGAIN_S", 0.0)
    chair.is_free.set()
    own = seat(chair, settings)
    with anyio.fail_after(60), capture_logs() as logged:
        assert await own.wait()
    assert known == [True, *[False] * 5]
    assert [line["event"] for line in logged].count("standby.sees_nothing") == 1


async def test_a_shared_directory_that_is_not_mounted_is_waited_for(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks like one of nobody's: its `home-id` is not there, nor anything else."""
    chair, path = Chair(), settings.home / "home-id"
    chair.owner = "ab12"
    chair.is_free.set()
    own = seat(chair, settings)
    monkeypatch.setattr(standby, "AGAIN_S", 0.01)

    async def mount() -> None:
        while own._known.is_well:  # noqa: ASYNC110 - it is another's, who tells nobody
            await anyio.sleep(0.01)
        assert not chair.is_waited_for.is_set(), "nor is the lead taken for it"
        path.write_text("ab12\n")

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(mount)
            assert await own.wait()


async def test_a_shared_directory_of_another_database_is_not_waited_for(settings: Settings) -> None:
    chair = Chair()
    chair.owner = "ab12"
    (settings.home / "home-id").write_text("cd34\n")
    own = seat(chair, settings)
    with anyio.fail_after(60), pytest.RaisesGroup(pytest.RaisesExc(StateError, match="belongs to another")):
        await own.wait()
    own.close()


async def test_who_was_asked_to_stop_does_not_lead_when_the_lead_gets_free_meanwhile(
    chair: Chair, settings: Settings
) -> None:
    """As when both are ended, the one that stands by first."""

    def end_both() -> None:
        chair.is_waited_for.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        chair.is_free.set()

    own = seat(chair, settings)
    own._server.on_ready = threading.Thread(target=end_both).start
    with anyio.fail_after(60):
        assert not await own.wait()


@pytest.fixture
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(home=tmp_path_factory.mktemp("home"))
