"""When a standby is kept, what it is given of the job's, and what it refuses to be."""

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

import msgspec
import pytest

from shoal.clock import BootClock
from shoal.runtime import removal, spool
from shoal.runtime.confine.confinement import Confinement
from shoal.runtime.logs import LogFile
from shoal.runtime.standby import minder, place, process
from shoal.runtime.warm import imports, names
from shoal.wire import Credentials, Limits, Order
from tests.support.real_plane import until
from tests.support.shares import SOURCE, an_order

GIB = 1 << 30
IMAGE: dict[str, Any] = {"modules": {"json": json.__file__}, "memory_bytes": 100 << 20}


class Walls:
    """As much of a confinement as a minder looks at."""

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


def gang(**changes: object) -> Order:
    values: dict[str, object] = {
        "nodes": ("node-1", "node-2"),
        "has_standby": True,
        "max_restarts": 3,
        "control_url": "http://127.0.0.1:1",
        "limits": Limits(cpus=1.0, memory_bytes=4 * GIB),
    }
    return an_order(**{**values, **changes})


def is_wanted(order: Order, walls: Walls | None = None) -> bool:
    return minder.is_wanted(order, walls or Walls())  # type: ignore[arg-type]


def test_standby_is_for_nodes_of_several_whose_ranks_may_begin_anew() -> None:
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


def test_standby_fits_the_same_share_with_other_peers_and_no_other() -> None:
    order = gang()
    anew = msgspec.structs.replace(order, nodes=("node-1", "node-9"), incarnation=3, master_port=4711)
    assert place.fits(order, anew)
    elsewhere = {
        "control_url": "http://127.0.0.2:1",
        "control_urls": ("http://127.0.0.2:1", "http://127.0.0.3:1"),
    }
    assert place.fits(order, msgspec.structs.replace(anew, **elsewhere)), "it asks those of the new order"
    for other in (
        {"run": "python other.py"},
        {"env": {"PYTHONPATH": "/other"}},
        {"uid": 4242},
        {"limits": Limits(cpus=2.0, memory_bytes=4 * GIB)},
        {"archive_digest": "0" * 64},
        {"epoch": 2},
        {"node_rank": 1},
        {"nodes": ("node-1",)},
    ):
        assert not place.fits(order, msgspec.structs.replace(anew, **other))


@pytest.fixture
def share(tmp_path: Path) -> spool.Share:
    directory = tmp_path / "spool" / "live" / "att_1" / "node-1"
    folder = directory / "stand-ins"
    folder.mkdir(parents=True)
    image = folder / names.IMAGE
    image.write_text(json.dumps(IMAGE))
    age(image)
    return spool.Share(directory)


def age(image: Path) -> None:
    os.utime(image, (time.time() - 60, time.time() - 60))


def test_image_is_read_when_it_has_been_the_same_for_a_while(share: spool.Share) -> None:
    assert minder.read_image(share.stand_ins, None) == minder.Image(**IMAGE)
    Path(share.stand_ins, names.IMAGE).touch()
    assert minder.read_image(share.stand_ins, None) is None


@pytest.mark.parametrize(
    "text",
    [
        b'{"other": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"modules": {"\xff": ""}, "memory_bytes": 1}',
        b'{"modules": {}, "memory_bytes": -1}',
        b'{"modules": {}, "memory_bytes": 1' + b"0" * 400 + b"}",
    ],
)
def test_image_that_no_zygote_writes_is_none_and_ends_nobody(share: spool.Share, text: bytes) -> None:
    image = Path(share.stand_ins, names.IMAGE)
    image.write_bytes(text)
    age(image)
    assert minder.read_image(share.stand_ins, None) is None


def test_image_is_never_read_through_a_link_or_from_anothers_file(share: spool.Share, tmp_path: Path) -> None:
    folder = Path(share.stand_ins)
    secret = tmp_path / "secret"
    secret.write_text(json.dumps(IMAGE))
    age(secret)
    (folder / names.IMAGE).unlink()
    (folder / names.IMAGE).symlink_to(secret)
    assert minder.read_image(share.stand_ins, None) is None
    (folder / names.IMAGE).unlink()
    secret.rename(folder / names.IMAGE)
    assert minder.read_image(share.stand_ins, None) is not None
    assert minder.read_image(share.stand_ins, os.geteuid() + 1) is None
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert minder.read_image(share.stand_ins, None) is None


@pytest.mark.parametrize("nonsense", ["[]", "{", '{"a": 1}', '{"modules": {"a": 1}, "memory_bytes": 1}', ""])
def test_image_that_makes_no_sense_is_none(share: spool.Share, nonsense: str) -> None:
    image = Path(share.stand_ins, names.IMAGE)
    image.write_text(nonsense)
    age(image)
    assert minder.read_image(share.stand_ins, None) is None


class Kept:
    """A minder whose standbys are other programs."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, share: spool.Share, walls: Walls, *words: str
    ) -> None:
        monkeypatch.setattr(minder, "command", lambda _: list(words))
        monkeypatch.setattr(minder, "LOOK_S", 0.0)
        self.share, self.walls = share, walls
        self.log = LogFile(share.log, 1 << 20, BootClock())
        self.minder = minder.Minder(
            gang(),
            Credentials(),
            share,
            walls,  # type: ignore[arg-type]
            BootClock(),
            self.log,
        )
        self.place = Path(place.directory_of(share) or "")

    def look(self, *, is_time: bool = True) -> None:
        self.minder.look(is_time=is_time)

    def said(self) -> bytes:
        log = Path(self.share.log)
        return log.read_bytes() if log.exists() else b""

    def is_locked(self) -> bool:
        return self.place.exists() and spool.is_locked(spool.Share(self.place))


def test_limits_of_ranks_and_standby_add_up_to_the_jobs(
    monkeypatch: pytest.MonkeyPatch, share: spool.Share
) -> None:
    kept = Kept(monkeypatch, share, Walls(), "/bin/sleep", "60")
    kept.look(is_time=False)
    assert not kept.place.exists()
    kept.look()
    assert kept.is_locked(), "it holds its place from its first moment"
    assert kept.walls.memory_limit is not None
    assert kept.walls.memory_limit < 4 * GIB
    kept.minder.end()
    assert not kept.place.exists()
    assert kept.walls.memory_limit == 4 * GIB


def test_standby_is_not_started_where_ranks_need_the_memory_and_ended_where_they_come_to(
    monkeypatch: pytest.MonkeyPatch, share: spool.Share
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
    monkeypatch: pytest.MonkeyPatch, share: spool.Share
) -> None:
    kept = Kept(monkeypatch, share, Walls(), "/bin/sleep", "60")
    kept.minder.give_way()
    assert kept.walls.memory_limit == 4 * GIB, "there was none"
    kept.look()
    assert kept.is_locked()
    assert kept.walls.memory_limit != 4 * GIB
    kept.minder.give_way()
    assert kept.walls.memory_limit == 4 * GIB
    until(lambda: not kept.is_locked(), "it was killed, and nothing waited for that")
    assert kept.place.exists(), "burying it can wait"
    kept.look(is_time=False)
    assert not kept.place.exists()
    kept.look()
    assert kept.is_locked(), "the ranks train again"
    kept.minder.give_way()
    kept.minder.end()
    assert not kept.place.exists()
    assert b"no standby waits" not in kept.said()


def test_memory_of_a_standby_is_the_ranks_again_when_nothing_of_it_lives(
    monkeypatch: pytest.MonkeyPatch, share: spool.Share
) -> None:
    monkeypatch.setattr(minder, "BURY_S", 0.2)
    monkeypatch.setattr(minder, "BURY_AGAIN_S", 0.0)
    kept = Kept(monkeypatch, share, Walls(), "/bin/sh", "-c", "sleep 60 & echo $!; exec sleep 60")
    kept.look()
    child = int(until(lambda: Path(spool.Share(kept.place).errors).read_text(), "its child holds its lock"))
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


def test_standby_that_ends_by_itself_is_told_of_and_not_tried_for_ever(
    monkeypatch: pytest.MonkeyPatch, share: spool.Share
) -> None:
    monkeypatch.setattr(minder, "AGAIN_S", 0.0)
    # As a real one does, it removes its directory before it ends.
    words = f"echo shoal: no standby: other modules >&2; rm -r {place.directory_of(share)}; exit 1"
    kept = Kept(monkeypatch, share, Walls(), "/bin/sh", "-c", words)
    deadline = time.monotonic() + 20
    while kept.minder._num_failed < minder.MAX_FAILED and time.monotonic() < deadline:
        kept.look()
    for _ in range(20):
        kept.look()
    said = Path(share.log).read_bytes()
    assert said.count(b"no standby waits on this node") == 1
    assert b"no standby waits on this node: other modules. It is tried again 2 times" in said
    assert b"`retry: {standby: false}`" in said
    assert kept.walls.memory_limit == 4 * GIB
    assert not kept.place.exists()


def test_place_of_a_standby_that_lives_is_not_buried(tmp_path: Path) -> None:
    directory = tmp_path / "att_1.node-1"
    directory.mkdir()
    lock = spool.take_lock(spool.Share(directory))
    assert lock is not None
    assert not place.bury(str(directory))
    os.close(lock)
    assert place.bury(str(directory))
    assert not directory.exists()
    assert place.bury(str(directory)), "there is nothing left to do"


@pytest.fixture
def settling(tmp_path: Path) -> tuple[Confinement, spool.Share, spool.Share]:
    """Walls with a place, and the share that they are to become."""
    share, at = spool.Share(tmp_path / "live" / "att_1" / "node-1"), spool.Share(tmp_path / "att_1.node-1")
    for directory in (share.directory, at.directory, at.work, at.scratch, at.stand_ins):
        Path(directory).mkdir(parents=True)
    walls = Confinement(an_order(confinement=()), share, "/usr/bin", at)
    groups = SimpleNamespace(paths=("/sys/fs/cgroup/nowhere",), limit_memory=print, weigh=print)
    walls._groups = groups  # type: ignore[assignment]
    spool.write_cgroups(at, groups.paths)
    return walls, share, at


def test_cgroups_of_a_share_that_began_are_not_those_of_the_place_that_it_left(
    settling: tuple[Confinement, spool.Share, spool.Share],
) -> None:
    walls, share, at = settling
    walls.settle(an_order())
    assert spool.read_cgroups(share) == walls.cgroups
    assert spool.read_cgroups(at) == ()


def test_place_that_is_half_left_does_not_name_the_shares_cgroups(
    settling: tuple[Confinement, spool.Share, spool.Share],
) -> None:
    walls, share, at = settling
    Path(at.work).rmdir()
    with pytest.raises(FileNotFoundError):
        walls.settle(an_order())
    assert spool.read_cgroups(share) == walls.cgroups
    assert spool.read_cgroups(at) == ()


def test_place_that_could_not_be_removed_is_held_by_the_share_that_left_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "att_1.node-1"
    directory.mkdir()
    lock = spool.take_lock(spool.Share(directory))
    assert lock is not None
    monkeypatch.setattr(process, "LOCK", lock)
    brief = place.Brief(order=gang(), credentials=Credentials(), expected={}, memory_bytes=None)
    standby = process.Standby(str(directory), brief)
    with monkeypatch.context() as patch:
        patch.setattr(removal, "remove", lambda *_, **__: False)
        standby._leave_place()
    assert not place.bury(str(directory)), "it is held"
    standby._leave_place()
    assert not directory.exists()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(lock)


def test_nothing_that_a_standby_starts_holds_its_place(tmp_path: Path) -> None:
    code = """
import os, subprocess, sys
from shoal.runtime.standby import process

class Standby:
    def __init__(self, *_): pass
    def prepare(self): subprocess.run(["ls", "/proc/self/fd"], close_fds=False, check=True)
    def wait(self): return 0
    def end(self): pass

held = os.open("/dev/null", os.O_RDONLY)
for fd in (process.MINDER, process.LOCK):
    os.dup2(held, fd)
process.Standby, process.place.BRIEF = Standby, type("Decoder", (), {"decode": lambda *_: None})()
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


def zygote_with(tmp_path: Path, expected: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """One that makes these imports and gives up there, or says that it would go on."""
    (tmp_path / names.EXPECTED).write_text(json.dumps(expected))
    code = (
        "import sys; from shoal.runtime.warm import zygote, imports\n"
        f"print(zygote._import_expected({str(tmp_path)!r}), 'colorsys' in sys.modules)"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": SOURCE},
        timeout=60,
    )


def an_image(tmp_path: Path) -> dict[str, str]:
    code = (
        "import json, colorsys; from shoal.runtime.warm import zygote, imports\n"
        f"print(json.dumps(imports.image({str(tmp_path)!r})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": SOURCE},
        timeout=60,
    )
    return dict(json.loads(done.stdout))


def test_zygote_makes_the_imports_of_the_one_before_it(tmp_path: Path) -> None:
    done = zygote_with(tmp_path, an_image(tmp_path))
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_zygote_that_finds_other_modules_than_the_one_before_it_gives_up(tmp_path: Path) -> None:
    image = an_image(tmp_path)
    moved = zygote_with(tmp_path, {**image, "colorsys": "/elsewhere/colorsys.py"})
    assert (moved.returncode, moved.stdout) == (1, "")
    assert "no standby" in moved.stderr
    assert "colorsys" in moved.stderr
    del image["json.decoder"]
    assert zygote_with(tmp_path, image).returncode == 1


def test_zygote_that_lacks_a_module_of_the_one_before_it_gives_up(tmp_path: Path) -> None:
    lacking = zygote_with(tmp_path, {**an_image(tmp_path), "made_by_the_ranks": "/work/made_by_the_ranks.py"})
    assert (lacking.returncode, lacking.stdout) == (1, "")
    assert "made_by_the_ranks" in lacking.stderr


def test_code_of_ours_is_no_part_of_the_image(tmp_path: Path) -> None:
    assert "shoal.runtime.warm.imports" in imports.image(str(tmp_path))
    assert "shoal.runtime.warm.imports" not in imports.image(str(Path(imports.__file__).parent))
