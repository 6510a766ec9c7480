"""A change that HAProxy does not take: it says why, and serves on as it did."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from shoal.serving.haproxy import plane as plane_module
from shoal.serving.haproxy.render import CALLERS, Place, Rendering, render
from shoal.serving.table import Limits, Table
from tests.support.haproxy import HaproxyLab, needs_haproxy, running_haproxy
from tests.support.serving import as_caller, callers, closed, service

pytestmark = needs_haproxy


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[HaproxyLab]:
    async with running_haproxy(tmp_path) as made:
        yield made


def broken(table: Table, place: Place) -> Rendering:
    made = render(table, place)
    return msgspec.structs.replace(made, frame=made.frame + "    nonsense here\n")


def files(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def served(lab: HaproxyLab) -> list[int]:
    return [(await lab.ask(as_caller(name))).status for name in ("ana", "bo", "cy")]


async def test_configuration_that_haproxy_refuses_changes_nothing(
    lab: HaproxyLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = await lab.replica()
    lab.serve(closed(replica))
    monkeypatch.setattr(plane_module, "render", broken)
    with pytest.raises(ValueError, match="nonsense"):
        lab.serve(closed(replica, callers=callers("cy")))
    assert (lab.plane.version, await served(lab)) == (1, [200, 200, 401])
    monkeypatch.undo()
    lab.serve(closed(replica, callers=callers("cy")))
    assert (lab.plane.version, await served(lab)) == (2, [401, 401, 200])


async def test_reload_that_fails_leaves_the_worker_that_serves(
    lab: HaproxyLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = await lab.replica()
    lab.serve(closed(replica))
    keep = lab.plane._files.keep

    def lose(rendering: Rendering) -> None:
        keep(rendering)
        (tmp_path / CALLERS).unlink()

    monkeypatch.setattr(lab.plane._files, "keep", lose)
    with pytest.raises(ValueError, match="did not start"):
        lab.serve(closed(replica, callers=callers("cy"), limits=Limits(rps=100)))
    assert (lab.plane.version, await served(lab)) == (1, [200, 200, 401])
    monkeypatch.undo()
    lab.serve(closed(replica, callers=callers("cy"), limits=Limits(rps=100)))
    assert (lab.plane.version, await served(lab)) == (2, [401, 401, 200])


async def test_longest_times_and_rarest_rates_are_taken(lab: HaproxyLab) -> None:
    lab.serve(service(await lab.replica(), timeout_s=1e12, queue_s=1e12, limits=Limits(rps=1e-9)))
    assert (await lab.ask(as_caller("whoever"))).status == 200


async def test_nobody_else_can_read_its_files(lab: HaproxyLab, tmp_path: Path) -> None:
    lab.serve(closed((await lab.replica()).told(secret="s3cret")))
    modes = {file.name: file.stat().st_mode & 0o077 for file in files(tmp_path)}
    assert {"haproxy.cfg", "callers.map", "master.sock"} <= modes.keys()
    assert set(modes.values()) == {0}
    assert "token-ana" not in "".join(file.read_text() for file in files(tmp_path) if file.is_file())
