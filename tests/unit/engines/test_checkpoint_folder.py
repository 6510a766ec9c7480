"""Checkpoints where nodes share a directory: listed, looked at, and gone when they are dropped."""

from __future__ import annotations

import threading
from pathlib import Path

import anyio
import pytest

from shoal.engines.base import SupportsCheckpoints, SupportsPrune
from shoal.engines.checkpoint_folder import CheckpointFolder
from shoal.engines.fake import VirtualClock
from shoal.errors import StateError
from tests.support.fakes.remote_engine import ScriptedEngine

pytestmark = pytest.mark.anyio


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "checkpoints"
    for job in ("job_1", "job_2"):
        (place / job / "deep").mkdir(parents=True)
        (place / job / "model.pt").write_bytes(b"weights")
    return place


def left(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()]


async def test_missing_shared_directory_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=f"this machine has no {tmp_path / 'away'}, which nodes share"):
        await CheckpointFolder(tmp_path / "away" / "checkpoints", VirtualClock()).inspect("job_1", 0.0)
    assert (
        await CheckpointFolder(tmp_path / "checkpoints", VirtualClock()).inspect("job_1", 0.0)
    ).items == ()


async def test_drop_removes_one_directory(folder: Path) -> None:
    saves = CheckpointFolder(folder, VirtualClock())
    assert await saves.jobs() == ["job_1", "job_2"]
    await saves.drop("job_1")
    await saves.drop("job_1")
    assert await saves.jobs() == ["job_2"]
    assert left(folder) == ["job_2"]


async def test_a_removal_that_was_cut_off_is_finished_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = CheckpointFolder(folder, VirtualClock())
    with monkeypatch.context() as patch:
        patch.setattr("shoal.runtime.files.removal.remove", lambda *_, **__: False)
        await saves.drop("job_1")
    assert len(left(folder)) == 2
    assert await saves.jobs() == ["job_2"]
    assert len(left(folder)) == 1


async def test_inspection_does_not_wait_for_removals(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves, begun, let_go = CheckpointFolder(folder, VirtualClock()), [], threading.Event()

    def remove_slowly(path: str, *, timeout_s: float) -> bool:
        begun.append(path)
        return let_go.wait(10.0)

    monkeypatch.setattr("shoal.runtime.files.removal.remove", remove_slowly)
    (folder / "job_3").mkdir()
    async with anyio.create_task_group() as tasks:
        for job in ("job_1", "job_2"):
            tasks.start_soon(saves.drop, job)
        with anyio.fail_after(5.0):
            while not begun:  # noqa: ASYNC110 - as long as it takes
                await anyio.sleep(0.01)
            assert (await saves.inspect("job_3", 0.0)).num_program_saves == 0
        assert len(begun) == 1, "one after the other"
        let_go.set()
    assert len(begun) == 2


async def test_a_link_in_the_place_of_a_job_leads_nowhere(folder: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis").touch()
    (folder / "job_3").symlink_to(precious)
    saves = CheckpointFolder(folder, VirtualClock())
    assert (await saves.inspect("job_3", 0.0)).num_program_saves == 0
    await saves.drop("job_3")
    await saves.drop("../precious")
    assert (precious / "thesis").exists()


async def test_an_engine_on_other_machines_looks_into_the_shared_directory(
    folder: Path, tmp_path: Path
) -> None:
    engine = ScriptedEngine(tmp_path / "home", VirtualClock(), shared_folder=str(tmp_path))
    assert isinstance(engine, SupportsCheckpoints)
    assert isinstance(engine, SupportsPrune)
    assert [
        program_save.name for program_save in (await engine.inspect_checkpoints("job_1", 0.0)).program_saves
    ] == [
        "model.pt",
        "deep/",
    ]
    await engine.drop_checkpoint("job_1")
    assert await engine.checkpoints() == ["job_2"]


async def test_without_a_shared_directory_there_is_nothing_to_look_at(tmp_path: Path) -> None:
    engine = ScriptedEngine(tmp_path / "home", VirtualClock())
    assert await engine.checkpoints() == []
    assert (await engine.inspect_checkpoints("job_1", 0.0)).items == ()
    await engine.drop_checkpoint("job_1")
