"""What Slurm wrote for jobs on the shared directory goes, once nobody reads it, and nothing else does."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.engines.fake import VirtualClock
from shoal.engines.remote.mailbox import Mailbox
from shoal.engines.slurm.client import CommandTransport
from shoal.engines.slurm.config import SlurmConfig
from shoal.engines.slurm.engine import SlurmEngine
from shoal.engines.slurm.rest import RestTransport
from shoal.engines.slurm.shared_files import unneeded_outputs
from shoal.engines.slurm.transport import SlurmTransport
from shoal.wire import EndKind
from tests.support.slurm.fake_slurm import FakeSlurm, engine_on, slurm_task_spec

MUCH = 1 << 40
LONG_AGO = 0.0
NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="owners are served by root alone")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    created = tmp_path / "shared" / "slurm"
    created.mkdir(parents=True)
    return created


@pytest.fixture
def engine(tmp_path: Path, folder: Path) -> SlurmEngine:
    config = SlurmConfig(shared=str(folder.parent))
    return engine_on(tmp_path / "home", VirtualClock(), FakeSlurm(), config)


def end(desk: Mailbox, attempt_id: str) -> None:
    desk.add((slurm_task_spec(attempt_id=attempt_id, nodes=("n0",)),), None)
    [task] = desk.find(attempt_id).values()
    desk.reap(task, EndKind.LOST, "it is over")


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


async def test_an_empty_output_goes_when_its_attempt_is_forgotten_and_words_stay_with_its_log(
    engine: SlurmEngine, folder: Path
) -> None:
    engine.mailbox.add((slurm_task_spec(attempt_id="att_1", nodes=("n0",)),), None)
    for attempt_id in ("att_2", "att_3"):
        end(engine.mailbox, attempt_id)
        await engine.forget(attempt_id)
    for name in ("att_1.0", "att_2.0", "att_2.1", "att_9.0"):  # the last is another home's
        (folder / f"shoal-{name}.out").touch()
    for name in ("shoal-att_3.0.out", "notes.txt"):
        (folder / name).write_text("srun: error")
    assert await engine.prune(LONG_AGO, MUCH) == 0
    left = ["notes.txt", "shoal-att_1.0.out", "shoal-att_3.0.out", "shoal-att_9.0.out"]
    assert names(folder) == left
    assert await engine.prune(LONG_AGO, 0) == 2
    left.remove("shoal-att_3.0.out")
    assert names(folder) == left


async def test_logs_go_though_outputs_cannot_and_those_go_once_they_can(
    engine: SlurmEngine, folder: Path, tmp_path: Path
) -> None:
    end(engine.mailbox, "att_1")
    await engine.forget("att_1")
    (folder / "shoal-att_1.0.out").write_text("srun: error")
    with pytest.MonkeyPatch.context() as away:
        away.setenv("PATH", "/nowhere")
        assert await engine.prune(LONG_AGO, 0) == 1
    assert names(folder) == ["shoal-att_1.0.out"]
    assert not any(path.is_file() for path in (tmp_path / "home" / "mailbox" / "archived").rglob("*"))
    assert await engine.prune(LONG_AGO + 1.0, MUCH) == 1
    assert names(folder) == []
    assert await engine.prune(LONG_AGO + 1.0, MUCH) == 0


async def test_without_a_shared_directory_nothing_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_on(tmp_path, VirtualClock(), FakeSlurm())
    monkeypatch.setattr(engine, "_transport", None)
    assert await engine.prune(LONG_AGO, 0) == 0


@pytest.mark.parametrize(
    "door", [CommandTransport(), RestTransport("http://127.0.0.1:1", "")], ids=["commands", "rest"]
)
def test_every_transport_lists_and_removes_outputs(door: SlurmTransport, folder: Path) -> None:
    assert door.outputs(str(folder / "none")) == {}
    (folder / "shoal-a.0.out").write_text("words")
    (folder / "shoal-b.0.out").touch()
    (folder / "other").touch()
    assert door.outputs(str(folder)) == {"shoal-a.0.out": 5, "shoal-b.0.out": 0}
    door.drop_outputs(str(folder), ["shoal-b.0.out", "shoal-gone.0.out"])
    door.drop_outputs(str(folder), [])
    assert names(folder) == ["other", "shoal-a.0.out"]


def test_a_path_that_no_job_of_ours_has_is_left_alone() -> None:
    odd = ["../shoal-a.0.out", "ana/b/shoal-a.0.out", "shoal-a.out", "shoal-a.0.out.txt", "shoal-a.x.out"]
    sizes = dict.fromkeys([*odd, "shoal-a.0.out", "ana/shoal-a.12.out"], 0)
    assert unneeded_outputs(sizes, {"a"}, []) == ["ana/shoal-a.12.out", "shoal-a.0.out"]


@pytest.fixture
def owners() -> Iterator[Path]:
    """A folder of root's where `nobody` has one, as `give` makes them, out of the way of pytest's own."""
    top = Path(tempfile.mkdtemp(prefix="shoal-outputs-", dir="/var/tmp"))
    (top / "slurm" / "nobody").mkdir(parents=True)
    os.chown(top / "slurm" / "nobody", NOBODY, NOBODY)
    yield top / "slurm"
    shutil.rmtree(top)


@needs_root
def test_outputs_of_owners_are_found_in_their_folders_and_links_are_passed_over(
    owners: Path, tmp_path: Path
) -> None:
    theirs = tmp_path / "shoal-att_1.0.out"
    theirs.touch()
    (owners / "nobody" / "shoal-att_1.0.out").touch()
    (owners / "nobody" / "shoal-att_1.1.out").symlink_to(theirs)
    (owners / "nobody" / "shoal-x\n0 root").mkdir()
    (owners / "nobody" / "shoal-att_2.0\n0 root\nshoal-att_1.0.out").touch()
    (owners / "link").symlink_to(tmp_path)
    (owners / "shoal-att_1.0.out").touch()  # of a time without owners
    transport = CommandTransport(as_owners=True)
    outputs = transport.outputs(str(owners))
    assert unneeded_outputs(outputs, {"att_1"}, []) == ["nobody/shoal-att_1.0.out"]
    transport.drop_outputs(str(owners), ["nobody/shoal-att_1.0.out", "nobody/shoal-att_1.1.out"])
    assert theirs.exists()
    assert not (owners / "nobody" / "shoal-att_1.0.out").exists()


@needs_root
@pytest.mark.parametrize("is_link", [True, False])
def test_a_folder_that_somebody_else_could_change_is_left_alone(owners: Path, is_link: bool) -> None:
    (owners / "nobody" / "shoal-att_1.0.out").touch()
    if is_link:
        owners.rename(owners.with_name("real"))
        owners.symlink_to("real")
    else:
        os.chown(owners, NOBODY, NOBODY)
    transport = CommandTransport(as_owners=True)
    assert transport.outputs(str(owners)) == {}
    transport.drop_outputs(str(owners), ["nobody/shoal-att_1.0.out"])
    assert (owners / "nobody" / "shoal-att_1.0.out").exists()
