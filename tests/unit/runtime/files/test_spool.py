"""What engine and supervisor leave each other on disk."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import msgspec
import pytest

from shoal.runtime.files import spool
from shoal.wire import EndKind, TaskOutcome
from tests.support.runtime.tasks import SOURCE, a_claim, a_task_spec, until


def a_share(tmp_path: Path) -> spool.SpoolTask:
    directory = tmp_path / "home" / "spool" / "live" / "att_1" / "node-1"
    directory.mkdir(parents=True)
    return spool.SpoolTask(directory)


def an_outcome() -> TaskOutcome:
    return TaskOutcome(attempt_id="att_1", epoch=1, node="node-1", kind=EndKind.LOST, ended_at=1.0)


def test_home_is_four_levels_above_a_task(tmp_path: Path) -> None:
    assert a_share(tmp_path).home == str(tmp_path / "home")


def test_home_of_a_task_elsewhere_is_its_parent(tmp_path: Path) -> None:
    assert spool.SpoolTask(tmp_path / "a" / "b").home == str(tmp_path / "a")


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    task = a_share(tmp_path)
    task_spec, outcome = a_task_spec(), an_outcome()
    started, stop = spool.RanksStarted(at=2.0, pids=(7,)), spool.SpoolStop(grace_s=3.0, at=4.0)
    spool.write_task_spec(task, task_spec)
    spool.write_outcome(task, outcome)
    spool.write_started(task, started)
    spool.write_stop(task, stop)
    spool.write_cgroups(task, ("/a", "/b"))
    records = (spool.read_task_spec(task), spool.read_outcome(task), spool.read_started(task))
    assert records == (task_spec, outcome, started)
    assert (spool.read_stop(task), spool.read_cgroups(task)) == (stop, ("/a", "/b"))


def test_missing_files_read_as_none(tmp_path: Path) -> None:
    task = a_share(tmp_path)
    records = (
        spool.read_task_spec(task),
        spool.read_outcome(task),
        spool.read_claim(task),
        spool.read_stop(task),
    )
    assert records == (None, None, None, None)
    assert spool.read_cgroups(task) == ()


def test_lock_has_one_holder_and_is_freed_by_closing(tmp_path: Path) -> None:
    task = a_share(tmp_path)
    first = spool.take_lock(task)
    assert first is not None
    assert spool.take_lock(task) is None
    assert spool.is_locked(task)
    os.close(first)
    assert not spool.is_locked(task)


def test_locked_directory_keeps_only_sweepers_out(tmp_path: Path) -> None:
    task = a_share(tmp_path)
    shelter = spool.lock_directory(task)
    sweeper = os.open(task.directory, os.O_RDONLY)
    for kind in (fcntl.LOCK_SH, fcntl.LOCK_EX):
        with pytest.raises(BlockingIOError):
            fcntl.flock(sweeper, kind | fcntl.LOCK_NB)
    assert not spool.is_locked(task)
    os.close(shelter)
    fcntl.flock(sweeper, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(sweeper)


def test_task_without_its_task_spec_does_not_count_as_over(tmp_path: Path) -> None:
    task = a_share(tmp_path)
    assert not spool.kill_leftovers(task.directory)
    assert spool.kill_leftovers(task.directory, a_task_spec())
    Path(task.directory).rmdir()
    assert spool.kill_leftovers(task.directory)


def test_leftovers_are_found_by_a_given_task_spec_if_its_file_is_gone(tmp_path: Path) -> None:
    task, task_spec = a_share(tmp_path), a_task_spec(attempt_id=f"att_{uuid.uuid4().hex}")
    env = {"SHOAL_ATTEMPT_ID": task_spec.identity.attempt_id, "SHOAL_NODE": task_spec.identity.node}
    with subprocess.Popen(["/bin/sleep", "60"], env=env) as process:
        try:
            until(lambda: Path(f"/proc/{process.pid}/environ").read_bytes().startswith(b"SHOAL_"))
            assert spool.kill_leftovers(task.directory, task_spec)
            assert process.wait(20) == -signal.SIGKILL
        finally:
            process.kill()


def test_busy_cgroup_takes_no_longer_than_the_timeout(tmp_path: Path) -> None:
    task = a_share(tmp_path)
    (tmp_path / "group" / "busy").mkdir(parents=True)
    (tmp_path / "group" / "busy" / "file").touch()  # this file cannot be removed
    spool.write_cgroups(task, (str(tmp_path / "group"),))
    began_at = time.monotonic()
    assert not spool.kill_leftovers(task.directory, a_task_spec(), timeout_s=0.0)
    assert time.monotonic() - began_at < 1.5


def test_copied_task_signals_no_process_of_the_original(tmp_path: Path) -> None:
    task, task_spec = a_share(tmp_path), a_task_spec(attempt_id=f"att_{uuid.uuid4().hex}")
    spool.write_task_spec(task, task_spec)
    group = tmp_path / "group"
    group.mkdir()
    spool.write_cgroups(task, (str(group),))
    env = {"SHOAL_ATTEMPT_ID": task_spec.identity.attempt_id, "SHOAL_NODE": task_spec.identity.node}
    with subprocess.Popen(["/bin/sleep", "60"], env=env) as process:
        try:
            until(lambda: Path(f"/proc/{process.pid}/environ").read_bytes().startswith(b"SHOAL_"))
            claim = a_claim(task, pid=process.pid, start_ticks=spool.start_ticks(process.pid))
            spool.durable_write(task.claimed, msgspec.json.encode(claim))
            shutil.copytree(task.directory, tmp_path / "copy", copy_function=shutil.copy2)
            copy = spool.SpoolTask(tmp_path / "copy")
            assert spool.is_copied(copy)
            assert not spool.is_copied(task)
            lock = spool.take_lock(copy)  # the copy's lock is free, whatever process holds the original's
            assert not spool.signal_supervisor(copy, signal.SIGKILL)
            assert not spool.kill_leftovers(copy.directory), "the original runs, so the copy is not over"
            assert process.poll() is None
            assert spool.read_cgroups(copy) == ()
            assert spool.read_cgroups(task) == (str(group),)
            assert lock is not None
            os.close(lock)
        finally:
            process.kill()
    assert spool.kill_leftovers(copy.directory)
    assert group.is_dir(), "the copy must not remove it"


def test_second_claim_is_always_refused(tmp_path: Path) -> None:
    task = a_share(tmp_path)
    assert spool.claim(task, 1.0)
    assert not spool.claim(task, 2.0)
    records = spool.read_claim(task)
    assert records is not None
    assert (records.pid, records.at) == (os.getpid(), 1.0)


def test_failed_claim_leaves_the_task_unclaimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = a_share(tmp_path)

    def no_space(fd: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        with pytest.raises(OSError, match="no space"):
            spool.claim(task, 1.0)
    assert spool.read_claim(task) is None
    assert spool.claim(task, 2.0)


def test_failed_write_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    spool.durable_write(path, b"old")

    def no_space(fd: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="no space"):
        spool.durable_write(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_draft_is_not_written_through_a_planted_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "file.new").symlink_to(victim)
    with pytest.raises(OSError):
        spool.durable_write(tmp_path / "file", b"x")
    assert victim.read_text() == "precious"


def test_process_with_a_reused_pid_is_not_signalled(tmp_path: Path) -> None:
    task = a_share(tmp_path)
    lock = spool.take_lock(task)
    assert lock is not None
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    foreign = a_claim(task, pid=pid)
    spool.durable_write(task.claimed, msgspec.json.encode(foreign))
    assert not spool.signal_supervisor(task, signal.SIGKILL)
    claim = a_claim(task, pid=pid, start_ticks=spool.start_ticks(pid) or 0)
    spool.durable_write(task.claimed, msgspec.json.encode(claim))
    assert spool.signal_supervisor(task, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(lock)


@pytest.mark.parametrize("room", [0, 1024])
def test_renamed_supervisor_is_found_by_its_name_and_killed(tmp_path: Path, room: int) -> None:
    task = a_share(tmp_path)
    code = (
        "import sys, time; from shoal.runtime.process import kernel\n"
        "kernel.rename((sys.executable, '-m', 'shoal.runtime.supervisor', sys.argv[1]))\n"
        "print('renamed', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, task.directory, "." * room]
    env = {**os.environ, "PYTHONPATH": SOURCE}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"renamed\n"
            spool.kill_supervisors(spool.SpoolTask(f"{task.directory}0"))
            assert process.poll() is None, "the supervisor of another task"
            spool.kill_supervisors(task)
            assert process.wait(20) == -signal.SIGKILL
        finally:
            process.kill()


@pytest.mark.parametrize("text", [b"\xff", b'{"attempt_id": "\xff"}', b'{"a": ' + b"[" * 100_000])
def test_malformed_outcome_is_always_a_decode_error(tmp_path: Path, text: bytes) -> None:
    """If a supervisor runs as the job's owner, that owner can write the file."""
    task = spool.SpoolTask(str(tmp_path))
    Path(task.outcome).write_bytes(text)
    with pytest.raises(msgspec.DecodeError):
        spool.read_outcome(task)
