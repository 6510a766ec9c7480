"""When a task has a standby, how much memory it gets, and which tasks it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.clock import BootClock
from shoal.runtime.confine.confinement import Confinement
from shoal.runtime.files import removal, spool
from shoal.runtime.process.log import LogFile
from shoal.runtime.standby import monitor, process, slot
from shoal.runtime.warm import launchers, plan, program
from shoal.wire import TaskCredentials, TaskSpec
from tests.support.planes.real import until
from tests.support.runtime.task_specs import change_task_spec
from tests.support.runtime.tasks import SOURCE, a_task_spec

GIB = 1 << 30
IMAGE: dict[str, Any] = {
    "modules": {"json": json.__file__},
    "plan": {"statements": ["import json"]},
    "memory_bytes": 100 << 20,
}


class Walls:
    """The part of a confinement that a monitor uses."""

    def __init__(self, used: int = GIB // 2) -> None:
        self.sandbox: object | None = object()
        self.cgroups: tuple[str, ...] = ("/sys/fs/cgroup/nowhere",)
        self.uid = None
        self.used = used
        self.memory_limit: int | None = 4 * GIB

    def memory_bytes(self) -> int:
        return self.used

    def limit_memory(self, memory_bytes: int) -> None:
        self.memory_limit = memory_bytes


def gang(**changes: object) -> TaskSpec:
    values: dict[str, object] = {
        "nodes": ("node-1", "node-2"),
        "has_standby": True,
        "max_restarts": 3,
        "control_url": "http://127.0.0.1:1",
        "cpus": 1.0,
        "memory_bytes": 4 * GIB,
    }
    return a_task_spec(**{**values, **changes})


def is_wanted(order: TaskSpec, walls: Walls | None = None) -> bool:
    return monitor.is_wanted(order, walls or Walls())  # type: ignore[arg-type]


def test_standby_needs_several_nodes_and_restarts_in_place() -> None:
    assert is_wanted(gang())
    assert not is_wanted(gang(nodes=("node-1",)))
    assert not is_wanted(gang(max_restarts=0))
    assert not is_wanted(gang(has_standby=False))


def test_setup_is_never_done_ahead_of_time() -> None:
    assert not is_wanted(gang(setup="rm -rf /data/out"))


def test_without_walls_of_its_own_there_is_no_standby() -> None:
    walls = Walls()
    walls.cgroups = ()
    assert not is_wanted(gang(), walls)
    walls = Walls()
    walls.sandbox = None
    assert not is_wanted(gang(), walls)


def test_standby_fits_only_the_same_task_with_other_peers() -> None:
    order = gang()
    anew = change_task_spec(order, nodes=("node-1", "node-9"), replacement=3, master_port=4711)
    assert slot.fits(order, anew)
    elsewhere = {
        "control_url": "http://127.0.0.2:1",
        "control_urls": ("http://127.0.0.2:1", "http://127.0.0.3:1"),
    }
    assert slot.fits(order, change_task_spec(anew, **elsewhere)), "it asks those of the new order"
    for other in (
        {"run": "python other.py"},
        {"env": {"PYTHONPATH": "/other"}},
        {"uid": 4242},
        {"cpus": 2.0, "memory_bytes": 4 * GIB},
        {"archive_digest": "0" * 64},
        {"epoch": 2},
        {"node_rank": 1},
        {"nodes": ("node-1",)},
    ):
        assert not slot.fits(order, change_task_spec(anew, **other))


@pytest.fixture
def share(tmp_path: Path) -> spool.SpoolTask:
    directory = tmp_path / "spool" / "live" / "att_1" / "node-1"
    folder = directory / "stand-ins"
    folder.mkdir(parents=True)
    image = folder / launchers.IMAGE
    image.write_text(json.dumps(IMAGE))
    age(image)
    return spool.SpoolTask(directory)


def age(image: Path) -> None:
    os.utime(image, (time.time() - 60, time.time() - 60))


def test_image_is_read_when_it_has_been_the_same_for_a_while(share: spool.SpoolTask) -> None:
    assert monitor.read_image(share.stand_ins, None) == monitor.ZygoteImage(**IMAGE)
    Path(share.stand_ins, launchers.IMAGE).touch()
    assert monitor.read_image(share.stand_ins, None) is None


@pytest.mark.parametrize(
    "text",
    [
        b'{"other": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"modules": {"\xff": ""}, "memory_bytes": 1}',
        b'{"modules": {}, "memory_bytes": -1}',
        b'{"modules": {}, "memory_bytes": 1' + b"0" * 400 + b"}",
    ],
)
def test_invalid_zygote_image_is_ignored(share: spool.SpoolTask, text: bytes) -> None:
    image = Path(share.stand_ins, launchers.IMAGE)
    image.write_bytes(text)
    age(image)
    assert monitor.read_image(share.stand_ins, None) is None


def test_image_is_never_read_through_a_link_or_from_anothers_file(
    share: spool.SpoolTask, tmp_path: Path
) -> None:
    folder = Path(share.stand_ins)
    secret = tmp_path / "secret"
    secret.write_text(json.dumps(IMAGE))
    age(secret)
    (folder / launchers.IMAGE).unlink()
    (folder / launchers.IMAGE).symlink_to(secret)
    assert monitor.read_image(share.stand_ins, None) is None
    (folder / launchers.IMAGE).unlink()
    secret.rename(folder / launchers.IMAGE)
    assert monitor.read_image(share.stand_ins, None) is not None
    assert monitor.read_image(share.stand_ins, os.geteuid() + 1) is None
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert monitor.read_image(share.stand_ins, None) is None


@pytest.mark.parametrize("nonsense", ["[]", "{", '{"a": 1}', '{"modules": {"a": 1}, "memory_bytes": 1}', ""])
def test_image_that_makes_no_sense_is_none(share: spool.SpoolTask, nonsense: str) -> None:
    image = Path(share.stand_ins, launchers.IMAGE)
    image.write_text(nonsense)
    age(image)
    assert monitor.read_image(share.stand_ins, None) is None


class Kept:
    """A monitor whose standbys are other programs."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, share: spool.SpoolTask, walls: Walls, *command: str
    ) -> None:
        monkeypatch.setattr(monitor, "command", lambda _: list(command))
        monkeypatch.setattr(monitor, "LOOK_S", 0.0)
        self.share, self.walls = share, walls
        self.log = LogFile(share.log, 1 << 20, BootClock())
        self.minder = monitor.StandbyMonitor(
            gang(),
            TaskCredentials(),
            share,
            walls,  # type: ignore[arg-type]
            BootClock(),
            self.log,
        )
        self.place = Path(slot.directory_of(share) or "")

    def look(self, *, is_time: bool = True) -> None:
        self.minder.poll(is_time=is_time)

    def said(self) -> bytes:
        log = Path(self.share.log)
        return log.read_bytes() if log.exists() else b""

    def is_locked(self) -> bool:
        return self.place.exists() and spool.is_locked(spool.SpoolTask(self.place))


def test_limits_of_ranks_and_standby_add_up_to_the_jobs(
    monkeypatch: pytest.MonkeyPatch, share: spool.SpoolTask
) -> None:
    kept = Kept(monkeypatch, share, Walls(), "/bin/sleep", "60")
    kept.look(is_time=False)
    assert not kept.place.exists()
    kept.look()
    assert kept.is_locked(), "it holds its place from its first moment"
    assert kept.walls.memory_limit is not None
    assert kept.walls.memory_limit < 4 * GIB
    kept.minder.stop()
    assert not kept.place.exists()
    assert kept.walls.memory_limit == 4 * GIB


def test_standby_is_not_started_where_ranks_need_the_memory_and_ended_where_they_come_to(
    monkeypatch: pytest.MonkeyPatch, share: spool.SpoolTask
) -> None:
    kept = Kept(monkeypatch, share, Walls(used=int(3.9 * GIB)), "/bin/sleep", "60")
    kept.look()
    assert not kept.place.exists()
    assert kept.walls.memory_limit == 4 * GIB
    kept.walls.used = GIB
    kept.look()
    assert kept.is_locked()
    kept.walls.used = int(3.9 * GIB)
    kept.look()
    assert not kept.place.exists()
    assert kept.walls.memory_limit == 4 * GIB
    assert b"the ranks need its memory" in Path(share.log).read_bytes()


def test_standby_gives_way_at_once_and_another_follows_it_later(
    monkeypatch: pytest.MonkeyPatch, share: spool.SpoolTask
) -> None:
    kept = Kept(monkeypatch, share, Walls(), "/bin/sleep", "60")
    kept.minder.yield_memory()
    assert kept.walls.memory_limit == 4 * GIB, "there was none"
    kept.look()
    assert kept.is_locked()
    assert kept.walls.memory_limit != 4 * GIB
    kept.minder.yield_memory()
    assert kept.walls.memory_limit == 4 * GIB
    until(lambda: not kept.is_locked(), "it was killed, and nothing waited for that")
    assert kept.place.exists(), "burying it can wait"
    kept.look(is_time=False)
    assert not kept.place.exists()
    kept.look()
    assert kept.is_locked(), "the ranks train again"
    kept.minder.yield_memory()
    kept.minder.stop()
    assert not kept.place.exists()
    assert b"no standby waits" not in kept.said()


def test_memory_of_a_standby_is_the_ranks_again_when_nothing_of_it_lives(
    monkeypatch: pytest.MonkeyPatch, share: spool.SpoolTask
) -> None:
    monkeypatch.setattr(monitor, "REAP_S", 0.2)
    monkeypatch.setattr(monitor, "REAP_AGAIN_S", 0.0)
    kept = Kept(monkeypatch, share, Walls(), "/bin/sh", "-c", "sleep 60 & echo $!; exec sleep 60")
    kept.look()
    child = int(
        until(lambda: Path(spool.SpoolTask(kept.place).errors).read_text(), "its child holds its lock")
    )
    kept.walls.used = int(3.9 * GIB)
    kept.look()
    assert kept.walls.memory_limit is not None
    assert kept.walls.memory_limit < 4 * GIB
    os.kill(child, signal.SIGKILL)
    kept.walls.used = GIB

    def is_restored() -> bool:
        kept.look()
        return kept.walls.memory_limit == 4 * GIB

    until(is_restored, "buried at a later look")
    assert not kept.place.exists()


def test_standby_that_ends_by_itself_is_reported_and_retried_a_few_times(
    monkeypatch: pytest.MonkeyPatch, share: spool.SpoolTask
) -> None:
    monkeypatch.setattr(monitor, "AGAIN_S", 0.0)
    # Like a real standby, it removes its directory before it ends.
    script = f"echo shoal: no standby: other modules >&2; rm -r {slot.directory_of(share)}; exit 1"
    kept = Kept(monkeypatch, share, Walls(), "/bin/sh", "-c", script)
    deadline = time.monotonic() + 20
    while kept.minder._num_failed < monitor.MAX_FAILED and time.monotonic() < deadline:
        kept.look()
    for _ in range(20):
        kept.look()
    log = Path(share.log).read_bytes()
    assert log.count(b"no standby waits on this node") == 1
    assert b"no standby waits on this node: other modules. It is tried again 2 times" in log
    assert b"`retry: {standby: false}`" in log
    assert kept.walls.memory_limit == 4 * GIB
    assert not kept.place.exists()


def test_slot_of_a_living_standby_is_not_reaped(tmp_path: Path) -> None:
    directory = tmp_path / "att_1.node-1"
    directory.mkdir()
    lock = spool.take_lock(spool.SpoolTask(directory))
    assert lock is not None
    assert not slot.reap(str(directory))
    os.close(lock)
    assert slot.reap(str(directory))
    assert not directory.exists()
    assert slot.reap(str(directory)), "there is nothing left to do"


@pytest.fixture
def settling(tmp_path: Path) -> tuple[Confinement, spool.SpoolTask, spool.SpoolTask]:
    """A confinement in a standby slot, and the task that takes it over."""
    share, at = (
        spool.SpoolTask(tmp_path / "live" / "att_1" / "node-1"),
        spool.SpoolTask(tmp_path / "att_1.node-1"),
    )
    for directory in (share.directory, at.directory, at.work, at.scratch, at.stand_ins):
        Path(directory).mkdir(parents=True)
    walls = Confinement(a_task_spec(confinement=()), share, "/usr/bin", at)
    groups = SimpleNamespace(paths=("/sys/fs/cgroup/nowhere",), limit_memory=print, set_cpu_weight=print)
    walls._cgroups = groups  # type: ignore[assignment]
    spool.write_cgroups(at, groups.paths)
    return walls, share, at


def test_cgroups_of_a_started_task_no_longer_belong_to_its_standby_slot(
    settling: tuple[Confinement, spool.SpoolTask, spool.SpoolTask],
) -> None:
    walls, share, at = settling
    walls.adopt(a_task_spec())
    assert spool.read_cgroups(share) == walls.cgroups
    assert spool.read_cgroups(at) == ()


def test_half_emptied_slot_does_not_name_the_tasks_cgroups(
    settling: tuple[Confinement, spool.SpoolTask, spool.SpoolTask],
) -> None:
    walls, share, at = settling
    Path(at.work).rmdir()
    with pytest.raises(FileNotFoundError):
        walls.adopt(a_task_spec())
    assert spool.read_cgroups(share) == walls.cgroups
    assert spool.read_cgroups(at) == ()


def test_slot_that_cannot_be_removed_stays_locked_by_its_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "att_1.node-1"
    directory.mkdir()
    lock = spool.take_lock(spool.SpoolTask(directory))
    assert lock is not None
    monkeypatch.setattr(process, "LOCK", lock)
    brief = slot.StandbyConfig(
        task_spec=gang(), credentials=TaskCredentials(), expected={}, memory_bytes=None
    )
    standby = process.StandbySupervisor(str(directory), brief)
    with monkeypatch.context() as patch:
        patch.setattr(removal, "remove", lambda *_, **__: False)
        standby._leave_slot()
    assert not slot.reap(str(directory)), "it is held"
    standby._leave_slot()
    assert not directory.exists()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(lock)


def test_children_of_a_standby_do_not_hold_its_slot(tmp_path: Path) -> None:
    code = """
import os, subprocess, sys
from shoal.runtime.standby import process

class StandbySupervisor:
    def __init__(self, *_): pass
    def prepare(self): subprocess.run(["ls", "/proc/self/fd"], close_fds=False, check=True)
    def wait(self): return 0
    def end(self): pass

held = os.open("/dev/null", os.O_RDONLY)
for fd in (process.SUPERVISOR_PIPE, process.LOCK):
    os.dup2(held, fd)
process.StandbySupervisor = StandbySupervisor
process.slot.CONFIG_DECODER = type("Decoder", (), {"decode": lambda *_: None})()
sys.exit(process.main(["nowhere"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": SOURCE},
        timeout=60,
    )
    # The three streams, and what `ls` itself has open.
    assert done.stdout.split() == ["0", "1", "2", "3"], done.stderr


AS_ZYGOTE = """
import sys
from shoal.runtime.warm import image, zygote
made = image.Image(sys.argv[1], sys.executable, sys.argv[2])
made.prepare(*zygote._first_plan(sys.executable, sys.argv[1], "/", []))
print("colorsys" in __import__("sys").modules)
"""


def zygote_with(tmp_path: Path, modules: dict[str, str] | None) -> subprocess.CompletedProcess[str]:
    """Run a zygote that makes these imports, then exits with an error or prints that it would continue."""
    variables = {"PYTHONPATH": SOURCE, "LANG": "C.UTF-8"}
    values = (sys.executable, "-c", "/", variables, ["import colorsys"])
    planned = plan.ImportPlan(*values)
    if modules is None:
        planned.write(str(tmp_path))
    else:
        (tmp_path / plan.PLAN).unlink(missing_ok=True)
        expected = {"plan": planned.as_facts(), "modules": modules}
        (tmp_path / launchers.EXPECTED).write_text(json.dumps(expected))
    return subprocess.run(
        [sys.executable, "-c", AS_ZYGOTE, str(tmp_path), f"{SOURCE}/shoal"],
        capture_output=True,
        text=True,
        check=False,
        env=variables,
        timeout=60,
    )


def an_image(tmp_path: Path) -> dict[str, str]:
    done = zygote_with(tmp_path, None)
    assert done.stdout == "True\n", done.stderr
    return dict(json.loads((tmp_path / launchers.IMAGE).read_text())["modules"])


def test_zygote_makes_the_imports_of_an_earlier_zygote(tmp_path: Path) -> None:
    done = zygote_with(tmp_path, an_image(tmp_path))
    assert done.stdout == "True\n", done.stderr


def test_zygote_that_finds_other_modules_than_the_image_exits(tmp_path: Path) -> None:
    image = an_image(tmp_path)
    moved = zygote_with(tmp_path, {**image, "colorsys": "/elsewhere/colorsys.py"})
    assert (moved.returncode, moved.stdout) == (1, "")
    assert "no standby" in moved.stderr
    assert "colorsys" in moved.stderr
    del image["json.decoder"]
    assert zygote_with(tmp_path, image).returncode == 1


def test_zygote_that_lacks_a_module_of_the_image_exits(tmp_path: Path) -> None:
    lacking = zygote_with(tmp_path, {**an_image(tmp_path), "made_by_the_ranks": "/work/made_by_the_ranks.py"})
    assert (lacking.returncode, lacking.stdout) == (1, "")
    assert "made_by_the_ranks" in lacking.stderr


def test_code_of_ours_is_no_part_of_the_image(tmp_path: Path) -> None:
    assert "shoal.runtime.warm.program" in program.loaded_modules(str(tmp_path))
    assert "shoal.runtime.warm.program" not in program.loaded_modules(str(Path(program.__file__).parent))
