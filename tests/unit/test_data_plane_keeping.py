"""The control plane keeps a data plane, and goes on where the disk or the machine does not allow that."""

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

from shoal.cli import data_plane
from shoal.cli.data_plane_facts import FACTS
from shoal.settings import Settings, load_settings

LISTENS = "print('listening on 127.0.0.1:1', flush=True); input()"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "logs").mkdir()
    return replace(load_settings({}), home=tmp_path)


def a_plane() -> Any:
    """One that has a service and no data plane yet."""
    services = SimpleNamespace(url=None, taken_port=None, table=SimpleNamespace(services=("chat",)))
    return SimpleNamespace(core=SimpleNamespace(key=b"k" * 32, services=services))


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
        tasks.start_soon(data_plane.keep, settings, a_plane())
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


def test_data_plane_that_nobody_would_find_again_is_ended(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]
) -> None:
    def write(path: Path, text: str) -> None:
        if path.name == FACTS:
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
    monkeypatch.setattr(data_plane, "terminate", lambda _: None)
    begun: list[tuple[int, ...]] = []
    monkeypatch.setattr(data_plane, "_start", lambda *words: begun.append(words[-1]))
    plane = a_plane()
    with socket.create_server(("127.0.0.1", 0)) as tenant:
        port = tenant.getsockname()[1]
        settings = replace(settings, serve_host="127.0.0.1", serve_port=port)
        found = {"url": "http://127.0.0.1:1", "told": data_plane._told(settings)}
        monkeypatch.setattr(data_plane, "running", lambda _: found)
        await data_plane._keep_once(settings, plane, None)
        assert (begun, plane.core.services.taken_port) == ([], port)
    await data_plane._keep_once(settings, plane, None)
    assert begun == [(port,)], "if the port is taken meanwhile, the one that runs stays"
    found["url"] = f"http://127.0.0.1:{port}"
    await data_plane._keep_once(settings, plane, None)
    assert (len(begun), plane.core.services.taken_port) == (1, None)
