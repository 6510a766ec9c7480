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

from shoal.cli import standby
from shoal.cli.standby import _Seat
from shoal.settings import Settings
from shoal.store import Standby

pytestmark = pytest.mark.anyio


class Chair:
    """A lead that becomes free when it is told to."""

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

    def meta(self, name: str) -> None:
        return None

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
