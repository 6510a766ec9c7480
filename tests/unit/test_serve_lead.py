"""Which control plane leads, which stands by and which exits. Only the leader opens the port for nodes."""

from __future__ import annotations

import contextlib
import errno
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from shoal.cli.backup import database_copy
from shoal.cli.control_plane import data_plane, server, standby
from shoal.errors import AlreadyLed, HomeMissing, SpecError, StoreUnavailable
from shoal.settings import Settings
from shoal.store.threaded import ThreadedStore

pytestmark = pytest.mark.anyio


async def test_standby_control_plane_refuses_nodes_and_releases_their_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports: list[int] = []

    def another_leads(settings: Settings) -> None:
        ports.append(settings.nodes_port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", settings.nodes_port), timeout=5)
        raise AlreadyLed("another control plane leads")

    monkeypatch.setattr(server, "open_core", another_leads)
    settings = Settings(home=tmp_path, nodes_host="127.0.0.1", nodes_port=0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for _ in range(2):
            with pytest.raises(AlreadyLed):
                await server._lead(settings, listener, None, None)  # type: ignore[arg-type]
    for port in ports:
        socket.create_server(("127.0.0.1", port), reuse_port=False).close()


@pytest.mark.parametrize(("url", "is_served"), [("", True), ("postgresql://127.0.0.1/d", False)])
async def test_only_a_sqlite_database_is_copied_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, *, is_served: bool
) -> None:
    begun: list[str] = []

    @contextlib.asynccontextmanager
    async def opened(_: Settings) -> AsyncIterator[Any]:
        yield SimpleNamespace(
            records=SimpleNamespace(store=ThreadedStore.__new__(ThreadedStore)),
            leadership=None,
            sealing=SimpleNamespace(key=b""),
            services=None,
        )

    def begins(name: str) -> Callable[..., Awaitable[None]]:
        async def begin(*_: object, **__: object) -> None:
            begun.append(name)
            await anyio.lowlevel.checkpoint()  # so that those beside the server begin, too

        return begin

    monkeypatch.setattr(server, "_opened", opened)
    monkeypatch.setattr(server, "exit_within", lambda _: None)
    monkeypatch.setattr(server, "serve", begins("server"))
    monkeypatch.setattr(server, "_watch_lead", begins("lead"))
    monkeypatch.setattr(data_plane, "supervise", begins("data plane"))
    monkeypatch.setattr(database_copy, "serve_requests", begins("backup"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await server._lead(Settings(home=tmp_path, database_url=url), listener, None, None)  # type: ignore[arg-type]
    assert ("backup" in begun) is is_served
    assert {"server", "lead", "data plane"} <= {*begun}


class Led(Exception):
    """Raised when the control plane leads."""


BLIP = StoreUnavailable("the database does not answer")
BARE = HomeMissing("this database belongs to another SHOAL_HOME")
STALE = OSError(errno.ESTALE, "Stale file handle", "/shared/keys")
Living = Callable[..., Awaitable[None]]


@pytest.fixture
def living(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Living:
    """A control plane that leads once what comes in its way, each time that it opens, is over."""

    async def live(*errors: Exception, is_first: bool, is_shared: bool = True) -> None:
        coming = iter([*errors, Led()])

        def opening(_: Settings) -> None:
            raise next(coming)

        async def may_lead(_: Settings) -> bool:
            return is_first

        async def stand_by(settings: Settings, listener: socket.socket, options: object) -> bool:
            listener.close()
            return True

        monkeypatch.setattr(server, "open_core", opening)
        monkeypatch.setattr(standby, "may_lead", may_lead)
        monkeypatch.setattr(standby, "stand_by", stand_by)
        monkeypatch.setattr(standby, "AGAIN_S", 0.0)
        settings = Settings(home=tmp_path)
        if is_shared:
            settings = Settings(
                home=tmp_path, shared=tmp_path / "shared", database_url="postgresql://db/shoal"
            )
        with socket.create_server(("127.0.0.1", 0)) as listener:
            await server._live(settings, listener, partial(print), sys.exit, is_deposed=False)

    return live


@pytest.mark.parametrize("error", [BLIP, STALE, BARE, AlreadyLed("another was quicker")])
async def test_standby_continues_if_the_shared_directory_is_missing_at_its_turn(
    living: Living, error: Exception
) -> None:
    """The standby may have waited for days, and no other control plane might be left to lead."""
    with pytest.raises(Led):
        await living(error, error, is_first=False)


@pytest.mark.parametrize("error", [BLIP, STALE])
async def test_a_first_start_ends_and_says_what_is_away(living: Living, error: Exception) -> None:
    with pytest.raises(StoreUnavailable, match=r"does not answer|/shared/keys cannot be used: Stale file"):
        await living(error, is_first=True)


async def test_a_first_start_ends_where_the_home_of_its_database_is_not(living: Living) -> None:
    with pytest.raises(HomeMissing):
        await living(BARE, is_first=True)


@pytest.mark.parametrize("is_deposed", [True, False])
def test_former_leader_starts_again_without_the_shared_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_deposed: bool
) -> None:
    (tmp_path / "away").touch()
    shared = tmp_path / "away" / "shared"
    settings = Settings(home=tmp_path / "home", shared=shared, database_url="postgresql://db/shoal", port=0)

    def live(*_: object, **__: object) -> None:
        raise Led

    monkeypatch.setattr(server, "load_settings", lambda: settings)
    monkeypatch.setattr(server, "tune", lambda: None)
    monkeypatch.setattr(server, "configure_log", lambda _: None)
    monkeypatch.setattr(anyio, "run", live)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(server, "listen", lambda *_, **__: (listener, None))
        with pytest.raises(Led if is_deposed else SpecError):
            server._run(is_foreground=True, is_deposed=is_deposed)


async def test_what_goes_wrong_in_a_home_of_its_own_is_not_waited_for(living: Living) -> None:
    with pytest.raises(OSError, match="Stale file handle"):
        await living(STALE, is_first=True, is_shared=False)


TUNED = """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
from shoal.api.http.server import MAX_CONNECTIONS, max_connections
from shoal.cli.control_plane.server import tune
tune()
print(max_connections() == min(MAX_CONNECTIONS, hard // 2))
"""


def test_server_takes_as_many_connections_as_the_machine_lets_it() -> None:
    ran = subprocess.run([sys.executable, "-c", TUNED], capture_output=True, text=True, check=True)
    assert ran.stdout == "True\n"
