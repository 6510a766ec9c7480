"""The control plane keeps a data plane running, and continues if the disk or the machine prevents that."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.from_thread
import pytest

from shoal.cli.control_plane import data_plane
from shoal.cli.control_plane.home import DATA_PLANE_FILE
from shoal.settings import Settings, load_settings

LISTENS = "print('listening on 127.0.0.1:1', flush=True); input()"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "logs").mkdir()
    return replace(load_settings({}), home=tmp_path)


KEY = b"k" * 32


def a_service() -> Any:
    """The state of one service without a data plane."""
    return SimpleNamespace(url=None, wanted_port=None, table=SimpleNamespace(services=("chat",)))


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("step", ["bound_log", "_start"])
async def test_full_disk_costs_a_turn_and_not_the_control_plane(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(data_plane, "AGAIN_S", 0.01)
    is_begun, failed = anyio.Event(), list[str]()

    def fail_once(*_: object) -> None:
        if not failed:
            failed.append(step)
            full()

    def start(*_: object) -> Any:
        if step == "_start":
            fail_once()
        anyio.from_thread.run_sync(is_begun.set)
        return SimpleNamespace(poll=lambda: None)

    monkeypatch.setattr(data_plane, "_start", start)
    if step == "bound_log":
        monkeypatch.setattr(data_plane, "bound_log", fail_once)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(data_plane.supervise, settings, a_service(), KEY)
        with anyio.fail_after(60):
            await is_begun.wait()
        tasks.cancel_scope.cancel()
    assert failed == [step]


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", LISTENS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        yield process
        process.kill()


def test_data_plane_whose_record_cannot_be_written_is_killed(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]
) -> None:
    def write(path: Path, text: str) -> None:
        if path.name == DATA_PLANE_FILE:
            full()

    monkeypatch.setattr(data_plane, "_spawn", lambda *_: child)
    monkeypatch.setattr(data_plane, "write_private", write)
    with pytest.raises(OSError, match="No space"):
        data_plane._start(settings, "token", None, (0,))
    assert child.poll() is not None


async def test_data_plane_returns_to_its_own_port_when_that_is_free_and_not_before(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_plane, "AGAIN_S", 0.01)
    monkeypatch.setattr(data_plane, "terminate_data_plane", lambda _: None)
    begun: list[tuple[int, ...]] = []
    monkeypatch.setattr(data_plane, "_start", lambda *arguments: begun.append(arguments[-1]))
    services = a_service()
    with socket.create_server(("127.0.0.1", 0)) as tenant:
        port = tenant.getsockname()[1]
        settings = replace(settings, serve_host="127.0.0.1", serve_port=port)
        record = {"url": "http://127.0.0.1:1", "arguments": data_plane._arguments(settings)}
        monkeypatch.setattr(data_plane, "running_data_plane", lambda _: record)
        await data_plane._supervise_once(settings, services, KEY, None)
        assert (begun, services.wanted_port) == ([], port)
    await data_plane._supervise_once(settings, services, KEY, None)
    assert begun == [(port,)], "if the port is taken meanwhile, the one that runs stays"
    record["url"] = f"http://127.0.0.1:{port}"
    await data_plane._supervise_once(settings, services, KEY, None)
    assert (len(begun), services.wanted_port) == (1, None)
