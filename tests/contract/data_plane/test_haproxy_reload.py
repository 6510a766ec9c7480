"""A change that HAProxy refuses: the error says why, and HAProxy serves on as before."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from shoal.serving.haproxy import plane as plane_module
from shoal.serving.haproxy.render import CALLERS, HaproxyConfig, HaproxySettings, render
from shoal.serving.table import CallerLimits, ServingTable
from tests.support.serving.data_plane_lab import callers, private_service, request_as, service
from tests.support.serving.haproxy import HaproxyLab, needs_haproxy, running_haproxy

pytestmark = needs_haproxy


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[HaproxyLab]:
    async with running_haproxy(tmp_path) as running:
        yield running


def broken(table: ServingTable, settings: HaproxySettings) -> HaproxyConfig:
    config = render(table, settings)
    return msgspec.structs.replace(config, frame=config.frame + "    nonsense here\n")


def files(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def served(lab: HaproxyLab) -> list[int]:
    return [(await lab.ask(request_as(name))).status for name in ("ana", "bo", "cy")]


async def test_configuration_that_haproxy_refuses_changes_nothing(
    lab: HaproxyLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = await lab.add_replica()
    lab.serve(private_service(replica))
    monkeypatch.setattr(plane_module, "render", broken)
    with pytest.raises(ValueError, match="nonsense"):
        lab.serve(private_service(replica, callers=callers("cy")))
    assert (lab.plane.version, await served(lab)) == (1, [200, 200, 401])
    monkeypatch.undo()
    lab.serve(private_service(replica, callers=callers("cy")))
    assert (lab.plane.version, await served(lab)) == (2, [401, 401, 200])


async def test_reload_that_fails_leaves_the_worker_that_serves(
    lab: HaproxyLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = await lab.add_replica()
    lab.serve(private_service(replica))
    keep = lab.plane._files.write

    def lose(rendering: HaproxyConfig) -> None:
        keep(rendering)
        (tmp_path / CALLERS).unlink()

    monkeypatch.setattr(lab.plane._files, "write", lose)
    with pytest.raises(ValueError, match="did not start"):
        lab.serve(private_service(replica, callers=callers("cy"), limits=CallerLimits(rps=100)))
    assert (lab.plane.version, await served(lab)) == (1, [200, 200, 401])
    monkeypatch.undo()
    lab.serve(private_service(replica, callers=callers("cy"), limits=CallerLimits(rps=100)))
    assert (lab.plane.version, await served(lab)) == (2, [401, 401, 200])


async def test_longest_timeouts_and_lowest_rates_are_accepted(lab: HaproxyLab) -> None:
    lab.serve(service(await lab.add_replica(), timeout_s=1e12, queue_s=1e12, limits=CallerLimits(rps=1e-9)))
    assert (await lab.ask(request_as("whoever"))).status == 200


async def test_haproxy_files_are_private_to_their_user(lab: HaproxyLab, tmp_path: Path) -> None:
    lab.serve(private_service((await lab.add_replica()).table_entry(secret="s3cret")))
    modes = {file.name: file.stat().st_mode & 0o077 for file in files(tmp_path)}
    assert {"haproxy.cfg", "callers.map", "master.sock"} <= modes.keys()
    assert set(modes.values()) == {0}
    assert "token-ana" not in "".join(file.read_text() for file in files(tmp_path) if file.is_file())
