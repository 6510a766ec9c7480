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

from shoal.runtime import spool
from shoal.wire import EndKind, NodeOutcome
from tests.support.shares import SOURCE, a_claim, an_order, until


def a_share(tmp_path: Path) -> spool.Share:
    directory = tmp_path / "home" / "spool" / "live" / "att_1" / "node-1"
    directory.mkdir(parents=True)
    return spool.Share(directory)


def an_outcome() -> NodeOutcome:
    return NodeOutcome(attempt_id="att_1", epoch=1, node="node-1", kind=EndKind.LOST, ended_at=1.0)


def test_home_is_four_levels_above_a_share(tmp_path: Path) -> None:
    assert a_share(tmp_path).home == str(tmp_path / "home")


def test_home_of_a_share_elsewhere_is_its_parent(tmp_path: Path) -> None:
    assert spool.Share(tmp_path / "a" / "b").home == str(tmp_path / "a")


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    share = a_share(tmp_path)
    order, outcome = an_order(), an_outcome()
    started, stop = spool.Started(at=2.0, pids=(7,)), spool.Stop(grace_s=3.0, at=4.0)
    spool.write_order(share, order)
    spool.write_outcome(share, outcome)
    spool.write_started(share, started)
    spool.write_stop(share, stop)
    spool.write_cgroups(share, ("/a", "/b"))
    found = (spool.read_order(share), spool.read_outcome(share), spool.read_started(share))
    assert found == (order, outcome, started)
    assert (spool.read_stop(share), spool.read_cgroups(share)) == (stop, ("/a", "/b"))


def test_nothing_written_reads_as_nothing(tmp_path: Path) -> None:
    share = a_share(tmp_path)
    found = (
        spool.read_order(share),
        spool.read_outcome(share),
        spool.read_claim(share),
        spool.read_stop(share),
    )
    assert found == (None, None, None, None)
    assert spool.read_cgroups(share) == ()


def test_lock_is_held_by_one_and_freed_by_closing(tmp_path: Path) -> None:
    share = a_share(tmp_path)
    first = spool.take_lock(share)
    assert first is not None
    assert spool.take_lock(share) is None
    assert spool.is_locked(share)
    os.close(first)
    assert not spool.is_locked(share)


def test_a_sheltered_share_is_locked_for_those_who_sweep_and_for_nobody_else(tmp_path: Path) -> None:
    share = a_share(tmp_path)
    shelter = spool.shelter(share)
    sweeper = os.open(share.directory, os.O_RDONLY)
    for kind in (fcntl.LOCK_SH, fcntl.LOCK_EX):
        with pytest.raises(BlockingIOError):
            fcntl.flock(sweeper, kind | fcntl.LOCK_NB)
    assert not spool.is_locked(share)
    os.close(shelter)
    fcntl.flock(sweeper, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(sweeper)


def test_a_share_that_is_there_without_its_order_is_not_said_to_be_over(tmp_path: Path) -> None:
    share = a_share(tmp_path)
    assert not spool.kill_leftovers(share.directory)
    assert spool.kill_leftovers(share.directory, an_order())
    Path(share.directory).rmdir()
    assert spool.kill_leftovers(share.directory)


def test_leftovers_are_found_by_the_order_of_who_has_it_where_its_file_is_gone(tmp_path: Path) -> None:
    share, order = a_share(tmp_path), an_order(attempt_id=f"att_{uuid.uuid4().hex}")
    env = {"SHOAL_ATTEMPT_ID": order.attempt_id, "SHOAL_NODE": order.node}
    with subprocess.Popen(["/bin/sleep", "60"], env=env) as process:
        try:
            until(lambda: Path(f"/proc/{process.pid}/environ").read_bytes().startswith(b"SHOAL_"))
            assert spool.kill_leftovers(share.directory, order)
            assert process.wait(20) == -signal.SIGKILL
        finally:
            process.kill()


def test_a_cgroup_that_stays_busy_takes_no_longer_than_was_given(tmp_path: Path) -> None:
    share = a_share(tmp_path)
    (tmp_path / "group" / "busy").mkdir(parents=True)
    (tmp_path / "group" / "busy" / "file").touch()  # nobody can remove it
    spool.write_cgroups(share, (str(tmp_path / "group"),))
    began_at = time.monotonic()
    assert not spool.kill_leftovers(share.directory, an_order(), timeout_s=0.0)
    assert time.monotonic() - began_at < 1.5


def test_a_copied_share_signals_none_of_the_processes_that_its_files_name(tmp_path: Path) -> None:
    share, order = a_share(tmp_path), an_order(attempt_id=f"att_{uuid.uuid4().hex}")
    spool.write_order(share, order)
    group = tmp_path / "group"
    group.mkdir()
    spool.write_cgroups(share, (str(group),))
    env = {"SHOAL_ATTEMPT_ID": order.attempt_id, "SHOAL_NODE": order.node}
    with subprocess.Popen(["/bin/sleep", "60"], env=env) as process:
        try:
            until(lambda: Path(f"/proc/{process.pid}/environ").read_bytes().startswith(b"SHOAL_"))
            claim = a_claim(share, pid=process.pid, start_ticks=spool.start_ticks(process.pid))
            spool.durable_write(share.claimed, msgspec.json.encode(claim))
            shutil.copytree(share.directory, tmp_path / "copy", copy_function=shutil.copy2)
            copy = spool.Share(tmp_path / "copy")
            assert spool.is_copied(copy)
            assert not spool.is_copied(share)
            lock = spool.take_lock(copy)  # that of the copy is free, whoever holds the other
            assert not spool.signal_supervisor(copy, signal.SIGKILL)
            assert not spool.kill_leftovers(copy.directory), "the original runs, so the copy is not over"
            assert process.poll() is None
            assert spool.read_cgroups(copy) == ()
            assert spool.read_cgroups(share) == (str(group),)
            assert lock is not None
            os.close(lock)
        finally:
            process.kill()
    assert spool.kill_leftovers(copy.directory)
    assert group.is_dir(), "not the copy's to remove"


def test_second_claim_is_refused_for_ever(tmp_path: Path) -> None:
    share = a_share(tmp_path)
    assert spool.claim(share, 1.0)
    assert not spool.claim(share, 2.0)
    found = spool.read_claim(share)
    assert found is not None
    assert (found.pid, found.at) == (os.getpid(), 1.0)


def test_failed_claim_leaves_the_share_unclaimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share = a_share(tmp_path)

    def no_space(fd: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        with pytest.raises(OSError, match="no space"):
            spool.claim(share, 1.0)
    assert spool.read_claim(share) is None
    assert spool.claim(share, 2.0)


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
    share = a_share(tmp_path)
    lock = spool.take_lock(share)
    assert lock is not None
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    foreign = a_claim(share, pid=pid)
    spool.durable_write(share.claimed, msgspec.json.encode(foreign))
    assert not spool.signal_supervisor(share, signal.SIGKILL)
    own = a_claim(share, pid=pid, start_ticks=spool.start_ticks(pid) or 0)
    spool.durable_write(share.claimed, msgspec.json.encode(own))
    assert spool.signal_supervisor(share, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(lock)


@pytest.mark.parametrize("room", [0, 1024])
def test_supervisor_that_took_its_name_over_is_found_and_killed_by_it(tmp_path: Path, room: int) -> None:
    share = a_share(tmp_path)
    code = (
        "import sys, time; from shoal.runtime import kernel\n"
        "kernel.rename((sys.executable, '-m', 'shoal.runtime.supervisor', sys.argv[1]))\n"
        "print('renamed', flush=True); time.sleep(60)"
    )
    words = [sys.executable, "-c", code, share.directory, "." * room]
    env = {**os.environ, "PYTHONPATH": SOURCE}
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=env) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"renamed\n"
            spool.kill_supervisors(spool.Share(f"{share.directory}0"))
            assert process.poll() is None, "another share's"
            spool.kill_supervisors(share)
            assert process.wait(20) == -signal.SIGKILL
        finally:
            process.kill()


@pytest.mark.parametrize("text", [b"\xff", b'{"attempt_id": "\xff"}', b'{"a": ' + b"[" * 100_000])
def test_outcome_that_is_none_is_one_kind_of_error(tmp_path: Path, text: bytes) -> None:
    """Where a supervisor runs as the job's owner, that owner can write it."""
    share = spool.Share(str(tmp_path))
    Path(share.outcome).write_bytes(text)
    with pytest.raises(msgspec.DecodeError):
        spool.read_outcome(share)
