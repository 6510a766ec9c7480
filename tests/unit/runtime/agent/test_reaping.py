"""Reaping a task whose node agent is gone, with real supervisors."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shoal.runtime.agent import reaping, spool_root
from shoal.runtime.agent.reaping import NOT_DEAD, NOT_YET, OVER, USAGE, main, reap
from shoal.runtime.files import spool
from shoal.runtime.process import tree
from tests.support.runtime.tasks import a_claim, a_task_spec, pids_with, tasks_in, until

GIVES_AWAY = "only root gives files away: `sudo make test`"
as_root = pytest.mark.skipif(os.getuid() != 0, reason=GIVES_AWAY)


def test_task_that_was_never_prepared_is_over(tmp_path: Path) -> None:
    assert main([str(tmp_path), "att_1", "n0", "0"]) == OVER
    assert main([str(tmp_path), "att_1", "n0"]) == USAGE


def test_supervisor_and_its_ranks_are_killed(tmp_path: Path) -> None:
    with tasks_in(tmp_path) as make:
        running = make(a_task_spec(run="trap '' TERM; sleep 1000 & wait"))
        running.spawn()
        until(lambda: os.path.exists(running.task.started))  # noqa: PTH110
        assert reap(running.task) == OVER
        assert not spool.is_locked(running.task)
        running.processes[0].wait(10)


def test_supervisor_without_a_name_on_its_command_line_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "kill_supervisors", lambda _: None)
    with tasks_in(tmp_path) as make:
        running = make(a_task_spec(run="sleep 1000"))
        running.spawn()
        until(lambda: os.path.exists(running.task.started))  # noqa: PTH110
        assert reap(running.task) == OVER
        running.processes[0].wait(10)


def test_supervisor_that_starts_later_finds_the_task_claimed(tmp_path: Path) -> None:
    with tasks_in(tmp_path) as make:
        running = make(a_task_spec())
        assert reap(running.task) == OVER
        process = running.spawn()
        process.wait(30)
        assert not os.path.exists(running.task.started)  # noqa: PTH110


def test_task_with_a_held_lock_does_not_count_as_gone(tmp_path: Path) -> None:
    with tasks_in(tmp_path) as make:
        running = make(a_task_spec())
        lock = spool.take_lock(running.task)
        assert lock is not None
        assert reap(running.task, timeout_s=0.3) == NOT_DEAD
        os.close(lock)


def test_exit_code_separates_unkillable_from_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with tasks_in(tmp_path) as make, monkeypatch.context() as patch:
        patch.setattr(spool, "kill_leftovers", lambda *_: False)
        running = make(a_task_spec())
        assert reap(running.task, timeout_s=0.3) == NOT_DEAD
        assert "something of it does not die" in capfd.readouterr().err
        (running.directory / "task_spec.json").unlink()
        assert reap(running.task, timeout_s=0.3) == NOT_YET
        assert "its task spec is gone" in capfd.readouterr().err


def test_task_with_swept_files_does_not_count_as_over(tmp_path: Path) -> None:
    with tasks_in(tmp_path) as make:
        running = make(a_task_spec(run="setsid sleep 1000 & wait"))
        running.spawn()
        until(lambda: os.path.exists(running.task.started))  # noqa: PTH110
        for name in ("task_spec.json", "lock", "claimed", "started"):
            (running.directory / name).unlink()
        assert reap(running.task, timeout_s=0.3) == NOT_YET


def test_doubtful_process_without_marks_is_neither_killed_nor_ignored(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mark = f"sleep {random.randrange(10**6, 10**9)}"
    with tasks_in(tmp_path) as make:
        running = make(a_task_spec(run=f"env -i setsid {mark} & wait", confinement=()))
        running.spawn()
        until(lambda: os.path.exists(running.task.started))  # noqa: PTH110
        until(lambda: len(pids_with(mark.replace(" ", "\0"))) == 1)
        [left] = pids_with(mark.replace(" ", "\0"))
        assert reap(running.task, timeout_s=1.0) == NOT_YET
        assert f"processes [{left}] may be of it" in capfd.readouterr().err
        os.kill(left, signal.SIGKILL)
        assert reap(running.task) == OVER


def lay_claim(root: Path, process: subprocess.Popen[bytes]) -> None:
    """Make a task below that root whose claim names this healthy process as its supervisor."""
    place = root / "spool" / "live" / "att_1" / "n0"
    place.mkdir(parents=True, mode=0o700)
    ticks = spool.start_ticks(process.pid)
    claim = a_claim(spool.SpoolTask(place), pid=process.pid, start_ticks=ticks)
    (place / "claimed").write_bytes(msgspec.json.encode(claim))
    assert spool.take_lock(spool.SpoolTask(place)) is not None  # held for as long as this process lives
    for path in (root, *(root / name for name in ("spool", "spool/live", "spool/live/att_1"))):
        path.chmod(0o700)


@pytest.fixture
def healthy() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        yield process
        process.kill()


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaping, "PAUSE_S", 0.0)


@pytest.fixture
def shared_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(reap, "__defaults__", (0.3,))
    path = tmp_path / "tmp"
    path.mkdir()
    path.chmod(0o1777)
    return path


def reap_below(root: Path) -> int:
    return main([str(root), "att_1", "n0", "0"])


def test_process_named_by_a_claim_of_this_user_is_killed(
    shared_folder: Path, healthy: subprocess.Popen[bytes]
) -> None:
    """This shows that the tests below could fail."""
    lay_claim(shared_folder / f"shoal-{os.getuid()}", healthy)
    assert reap_below(shared_folder) == NOT_DEAD
    healthy.wait(10)


@as_root
@pytest.mark.parametrize("name", [f"shoal-{os.getuid()}", f"shoal-{os.getuid()}-0"])
def test_claim_of_another_user_kills_no_process(
    shared_folder: Path, healthy: subprocess.Popen[bytes], name: str
) -> None:
    lay_claim(shared_folder / name, healthy)
    give_away(shared_folder / name)
    assert reap_below(shared_folder) == OVER
    assert healthy.poll() is None


@as_root
def test_directory_of_another_user_does_not_prevent_reaping(
    shared_folder: Path, healthy: subprocess.Popen[bytes]
) -> None:
    (shared_folder / f"shoal-{os.getuid()}").touch()
    own_root = Path(spool_root.prepare_root(str(shared_folder)))
    lay_claim(own_root, healthy)
    (shared_folder / f"shoal-{os.getuid()}").unlink()
    (shared_folder / f"shoal-{os.getuid()}" / "spool" / "live" / "att_1" / "n0" / "lock").mkdir(parents=True)
    give_away(shared_folder / f"shoal-{os.getuid()}")
    assert reap_below(shared_folder) == NOT_DEAD
    healthy.wait(10)


@pytest.mark.parametrize("where", ["", "spool", "spool/live", "spool/live/att_1", "spool/live/att_1/n0"])
@pytest.mark.parametrize("trap", ["open", "link", "another's"])
def test_claim_that_others_could_have_written_kills_no_process(
    shared_folder: Path,
    healthy: subprocess.Popen[bytes],
    capfd: pytest.CaptureFixture[str],
    where: str,
    trap: str,
) -> None:
    root = shared_folder / f"shoal-{os.getuid()}"
    lay_claim(root, healthy)
    path = root / where
    if trap == "another's" and os.getuid() != 0:
        pytest.skip(GIVES_AWAY)
    if trap == "open":
        path.chmod(0o775)
    elif trap == "link":
        path.rename(shared_folder.parent / "there")
        path.symlink_to(shared_folder.parent / "there")
    else:
        os.chown(path, 1, 1)
    is_passed_over = not where and trap != "open"  # it never becomes a root of ours
    assert reap_below(shared_folder) == (OVER if is_passed_over else NOT_YET)
    assert healthy.poll() is None
    assert ("chmod go-w" in capfd.readouterr().err) is not is_passed_over


@pytest.mark.parametrize("trap", ["open", "another's"])
def test_claim_in_a_foreign_spool_kills_no_process(
    tmp_path: Path, healthy: subprocess.Popen[bytes], trap: str
) -> None:
    root = tmp_path / "named"
    lay_claim(root, healthy)
    if trap == "open":
        root.chmod(0o777)
    elif os.getuid() != 0:
        pytest.skip(GIVES_AWAY)
    else:
        give_away(root)
    assert reap_below(root) == NOT_YET
    assert healthy.poll() is None


def give_away(root: Path) -> None:
    for path in (root, *root.rglob("*")):
        os.chown(path, 1, 1)


def test_process_with_a_hidden_environment_is_doubtful_unless_older_or_shoals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = [
        sys.executable,
        "-c",
        "import time; time.sleep(60)",
        "-m",
        "shoal.runtime.agent.bootstrap",
        "n1",
    ]
    with (
        subprocess.Popen(["/bin/sleep", "60"], cwd="/") as other,
        subprocess.Popen(command, cwd="/") as other_shoal,
    ):
        try:
            until(lambda: b"shoal" in Path(f"/proc/{other_shoal.pid}/cmdline").read_bytes())
            both = {other.pid, other_shoal.pid}
            since = spool.start_ticks(other.pid)
            assert since is not None
            assert not tree.doubtful("/nowhere", since) & both

            def hidden(pid: int) -> bytes:
                raise PermissionError(13, "Permission denied")

            monkeypatch.setattr(tree, "_environment", hidden)
            assert tree.doubtful("/nowhere", since) & both == {other.pid}
            assert not tree.doubtful("/nowhere", since + 10**6) & both
        finally:
            other.kill()
            other_shoal.kill()
