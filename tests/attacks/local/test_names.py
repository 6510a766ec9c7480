"""Rows 27 and 28 at the engine: ids and node names that are paths, and places of somebody's own choosing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.clock import SystemClock
from shoal.engines.base import Submission
from shoal.engines.local import LocalEngine, SimulatedNodes
from shoal.errors import EngineRefused
from tests.support.runtime.task_specs import change_task_spec, task_spec_of

pytestmark = pytest.mark.anyio
NAMES = [
    "../../canary",
    "..",
    ".",
    "",
    "/etc",
    "a/../../../canary",
    "a/b",
    "..\\..\\canary",
    "%2e%2e%2fcanary",
    "canary\0.json",
    "a\nb",
    "C:\\canary",
    "file:///canary",
    "~root",
    ".hidden",
    "-rf",
    "x" * 200,
    "a b",
    "$(id)",
    "\u202e",
    "\uff41",
]


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[LocalEngine]:
    home = tmp_path / "home"
    nodes = SimulatedNodes(count=1, gpus_per_node=0)
    engine = LocalEngine(
        home, clock=SystemClock(), server_file=home / "server.json", simulated=nodes, confinement=()
    )
    # What a name that climbs out of the spool would find.
    for place in (tmp_path, home, home / "spool", home / "spool" / "live"):
        folder = place / "canary"
        folder.mkdir()
        for name in ("log", "outcome.json", "task_spec.json"):
            (folder / name).write_text("1.0 0 o precious\n")
    yield engine
    await engine.close()


def submission(attempt_id: str = "att_1", node: str = "sim-01", **fields: Any) -> Submission:
    task_spec = task_spec_of(
        attempt_id=attempt_id, epoch=1, job_id="job_1", job_number=1, job_name="j", project="p", node=node,
        node_rank=0, nodes=(node,), ranks_per_node=1, run="true", cpus=1,
    )  # fmt: skip
    task_spec = change_task_spec(task_spec, **fields)
    return Submission(attempt_id=attempt_id, epoch=1, task_specs=(task_spec,))


def everything(place: Path) -> dict[str, bytes | None]:
    entries = sorted(place.rglob("*"))
    return {str(path): path.read_bytes() if path.is_file() else None for path in entries}


@pytest.mark.parametrize("name", NAMES, ids=ascii)
async def test_an_attempt_id_that_is_no_plain_name_does_nothing(
    engine: LocalEngine, tmp_path: Path, name: str
) -> None:
    before = everything(tmp_path)
    with pytest.raises(EngineRefused):
        await engine.submit(submission(name))
    await engine.cancel(name, 0.0)
    await engine.forget(name)
    chunk = await engine.read_log(name, "sim-01", 0, 1000)
    assert (chunk.data, chunk.is_complete) == (b"", True)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("name", NAMES, ids=ascii)
async def test_a_node_that_is_no_plain_name_does_nothing(
    engine: LocalEngine, tmp_path: Path, name: str
) -> None:
    (tmp_path / "home" / "spool" / "live" / "att_1").mkdir()
    before = everything(tmp_path)
    with pytest.raises(EngineRefused):
        await engine.submit(submission("att_2", node=name))
    chunk = await engine.read_log("att_1", name, 0, 1000)
    assert (chunk.data, chunk.is_complete) == (b"", True)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("offset,limit", [(-1, 10), (0, -5), (2**62, 10), (0, 2**62)])
async def test_a_page_of_a_log_that_cannot_be_is_empty(engine: LocalEngine, offset: int, limit: int) -> None:
    assert (await engine.read_log("att_none", "sim-01", offset, limit)).data == b""


@pytest.mark.parametrize(
    "place", ["/etc", "/root", "HOME", "HOME/keys", "HOME/checkpoints", "HOME/checkpoints/../keys", "ckpt"]
)
async def test_checkpoints_are_kept_in_one_place_and_nowhere_else(
    engine: LocalEngine, tmp_path: Path, place: str
) -> None:
    directory = place.replace("HOME", str(tmp_path / "home"))
    with pytest.raises(EngineRefused):
        await engine.submit(submission(checkpoint_dir=directory))
    assert not (tmp_path / "home" / "spool" / "live" / "att_1").exists()


@pytest.mark.parametrize("job_id", ["../keys", "/etc", "a/b", "", "a\0b"], ids=ascii)
async def test_a_job_id_that_is_a_path_gets_no_checkpoint_directory(
    engine: LocalEngine, tmp_path: Path, job_id: str
) -> None:
    directory = f"{tmp_path}/home/checkpoints/{job_id}"
    with pytest.raises(EngineRefused):
        await engine.submit(submission(job_id=job_id, checkpoint_dir=directory))
    assert not (tmp_path / "home" / "keys").exists()


async def test_a_link_in_the_place_of_a_checkpoint_directory_is_refused(
    engine: LocalEngine, tmp_path: Path
) -> None:
    folder = tmp_path / "home" / "checkpoints"
    folder.mkdir()
    (tmp_path / "victim").mkdir(mode=0o700)
    (folder / "job_1").symlink_to(tmp_path / "victim")
    with pytest.raises(EngineRefused, match="not a directory"):
        await engine.submit(submission(checkpoint_dir=str(folder / "job_1")))
    assert (tmp_path / "victim").stat().st_uid == (tmp_path / "home").stat().st_uid


@pytest.mark.parametrize("job_id", NAMES, ids=ascii)
async def test_only_a_jobs_own_checkpoint_directory_is_dropped(
    engine: LocalEngine, tmp_path: Path, job_id: str
) -> None:
    (tmp_path / "home" / "checkpoints" / "job_1").mkdir(parents=True)
    before = everything(tmp_path)
    await engine.drop_checkpoint(job_id)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("value", ["a\0b", "\0"])
async def test_nul_in_process_arguments_is_refused(engine: LocalEngine, value: str) -> None:
    for fields in ({"run": value}, {"env": {"A": value}}, {"env": {value: "A"}}):
        with pytest.raises(EngineRefused):
            await engine.submit(submission(**fields))


async def test_an_archive_elsewhere_is_not_taken_for_the_ordered_one(
    engine: LocalEngine, tmp_path: Path
) -> None:
    task_spec = submission(archive_digest="0" * 64)
    for path in (None, str(tmp_path / "nowhere"), str(tmp_path)):
        with pytest.raises(EngineRefused, match="which is not at"):
            await engine.submit(msgspec.structs.replace(task_spec, archive_path=path))
