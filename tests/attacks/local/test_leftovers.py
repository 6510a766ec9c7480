"""Row 38: what a job leaves behind in its directories before Shoal goes through them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest

from shoal.clock import SystemClock
from shoal.engines.base import Submission
from shoal.engines.local import LocalEngine, SimulatedNodes
from shoal.ids import id_factory
from shoal.model.evidence import Evidence
from shoal.runtime.files import removal, spool
from shoal.wire import EndKind
from tests.support.runtime.confinement_modes import CGROUP, JOB_UID, needs
from tests.support.runtime.task_specs import change_task_spec, task_spec_of
from tests.support.runtime.tasks import StartTask, a_task_spec

FULL = (CGROUP, "bubblewrap", "uid")
new_id = id_factory(time.time)
DEEP = 1100
"""Deeper than Python's stack and than the usual number of open files."""
GO_DEEP = f"python -c \"import os; [(os.mkdir('d'), os.chdir('d')) for _ in range({DEEP})]\""

PLANTS = {
    "a link to a directory": "ln -s {canary} link",
    "a link to a file": "ln -s {canary}/file link",
    "links in a circle": "ln -s a b; ln -s b a; ln -s . self",
    "a pipe nobody writes to": "mkfifo pipe",
    "a socket": "python -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"s\")'",
    "hard links to a file of its own": "touch a; ln a b; mkdir c; ln a c/d",
    "directories closed to everybody": "mkdir -p x/y/z; touch x/y/z/f; chmod 0 x/y/z x/y x",
    "names that are not text": "touch \"$(printf 'a\\377b')\" '-rf' '*' \"$(printf 'line\\nbreak')\"",
    "a file larger than any disk": "truncate -s 4T sparse",
    "a tree deeper than any path": GO_DEEP,
}


@pytest.fixture
def canary() -> Iterator[Path]:
    """Within the reach of every user, and none of a job's business."""
    place = Path(tempfile.mkdtemp(prefix="shoal-canary-", dir="/srv"))
    (place / "file").write_text("precious")
    (place / "file").chmod(0o640)
    place.chmod(0o751)
    yield place
    assert (place / "file").read_text() == "precious"
    assert [(p.stat().st_mode & 0o777, p.stat().st_uid) for p in (place, place / "file")] == [
        (0o751, os.geteuid()),
        (0o640, os.geteuid()),
    ]
    shutil.rmtree(place)


@needs(*FULL)
@pytest.mark.parametrize("plant", PLANTS)
def test_only_files_of_the_rank_are_removed_from_tmp(start: StartTask, canary: Path, plant: str) -> None:
    run = f"cd /tmp; {PLANTS[plant].format(canary=canary)}; exit 3"
    task = start(a_task_spec(run=run, confinement=FULL, uid=JOB_UID))
    outcome = task.run()
    assert (outcome.kind, outcome.exit_code) == (EndKind.EXITED, 3), outcome
    assert removal.remove(task.task.scratch, timeout_s=30.0)


class Local:
    """A real engine with real supervisors."""

    def __init__(self, home: Path) -> None:
        self.home = home
        nodes = SimulatedNodes(count=1, gpus_per_node=0)
        self.engine = LocalEngine(
            home, clock=SystemClock(), server_file=home / "server.json", simulated=nodes
        )

    async def run(self, run: str, **fields: object) -> str:
        task_spec = task_spec_of(
            attempt_id=new_id("att"), epoch=1, job_id="job_1", job_number=1, job_name="j", project="p",
            node="sim-01", node_rank=0, nodes=("sim-01",), ranks_per_node=1, run=run,
            cpus=1, uid=JOB_UID if os.geteuid() == 0 else None,
        )  # fmt: skip
        task_spec = change_task_spec(task_spec, **fields)
        await self.engine.submit(
            Submission(attempt_id=task_spec.identity.attempt_id, epoch=1, task_specs=(task_spec,))
        )
        with anyio.fail_after(30):
            while True:
                seen = [
                    o for o in await self.engine.list_owned() if o.attempt_id == task_spec.identity.attempt_id
                ]
                if seen[0].evidence is Evidence.ENDED:
                    assert seen[0].outcome is not None
                    assert seen[0].outcome.kind is EndKind.SUCCEEDED, seen[0].outcome
                    return task_spec.identity.attempt_id
                await anyio.sleep(0.02)


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[Local]:
    engine = Local(tmp_path / "home")
    yield engine
    await engine.engine.close()


@pytest.mark.anyio
async def test_forgetting_a_work_directory_full_of_plants_touches_nothing_else(
    local: Local, canary: Path
) -> None:
    script = "\n".join(
        f"mkdir p{number} && (cd p{number} && {text.format(canary=canary)})"
        for number, text in enumerate(PLANTS.values())
    )
    attempt_id = await local.run(script)
    await local.engine.forget(attempt_id)
    kept = local.home / "spool" / "archived" / attempt_id / "sim-01"
    assert {path.name for path in kept.iterdir()} >= {"log", "outcome.json"}
    assert not {"work", "scratch", "archive.tar"} & {path.name for path in kept.iterdir()}
    with anyio.fail_after(30):
        while list((local.home / "spool" / "trash").iterdir()):
            await local.engine.list_owned()  # every look sweeps a little more


@pytest.mark.anyio
async def test_a_checkpoint_directory_full_of_plants_serves_the_next_attempt(
    local: Local, canary: Path
) -> None:
    directory = local.home / "checkpoints" / "job_1"
    fields = {"checkpoint_dir": str(directory), "checkpoint_path": "ckpt"}
    plants = [text.format(canary=canary) for text in PLANTS.values() if text is not GO_DEEP]
    first = "cd ckpt\n" + "\n".join(f"mkdir p{i} && (cd p{i} && {text})" for i, text in enumerate(plants))
    await local.run(first, **fields)
    await local.run("test -d ckpt/p0 && echo second > ckpt/said", **fields)
    assert (directory / "said").read_text() == "second\n"


RENAMER = """
import os, sys
place, canary = sys.argv[1:]
os.setgid(65534), os.setuid(65534)
os.chdir(place)
print("ready", flush=True)
while os.path.exists("."):
    for name in [n for n in os.listdir(".") if n.startswith("d")][:50]:
        try:
            os.rename(name, "aside"); os.symlink(canary, name); os.unlink(name); os.rename("aside", name)
        except OSError:
            pass
"""


@pytest.mark.serial
@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user")
def test_a_tree_that_changes_under_the_walk_leads_nowhere_else(canary: Path) -> None:
    place = Path(tempfile.mkdtemp(prefix="shoal-tree-", dir="/srv"))
    for number in range(300):
        (place / f"d{number}" / "inner").mkdir(parents=True)
        (place / f"d{number}" / "inner" / "f").touch()
    for path in (place, *place.rglob("*")):
        os.chown(path, 65534, 65534)
    canary.chmod(0o757)  # so that the walk could do harm here, were it led here
    command = [sys.executable, "-c", RENAMER, str(place), str(canary)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        removal.remove(str(place), timeout_s=3.0)
        other.kill()
    assert removal.remove(str(place), timeout_s=30.0)
    canary.chmod(0o751)
    assert [path.name for path in canary.iterdir()] == ["file"]


def test_removing_takes_as_long_as_it_may_and_goes_on_later(tmp_path: Path) -> None:
    top = tmp_path / "top"
    for number in range(200):
        (top / f"d{number}").mkdir(parents=True)
    assert not removal.remove(str(top), timeout_s=0.0)
    assert top.exists()
    assert removal.remove(str(top), timeout_s=30.0)
    assert removal.remove(str(top), timeout_s=30.0)
    assert not top.exists()


@needs(*FULL)
def test_a_link_put_in_the_place_of_the_spools_own_directories_is_not_followed(
    start: StartTask, canary: Path
) -> None:
    """Only root could; an older Shoal, or a restored backup, might have left it so."""
    task = start(a_task_spec(run="true", confinement=FULL, uid=JOB_UID))
    Path(task.task.work).symlink_to(canary)
    outcome = task.run()
    assert outcome.kind is not EndKind.SUCCEEDED
    assert spool.read_started(task.task) is None
