"""Processes that look like zombies but live, and processes that do not die."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.runtime.files import spool
from shoal.runtime.process import tree
from tests.support.faults.hung_disk import HungDisk, hung_disk, what_is_missing
from tests.support.runtime.tasks import until

MARKS = frozenset({b"SHOAL_ATTEMPT_ID=att_1", b"SHOAL_NODE=n1"})
ENVIRONMENT = {"SHOAL_ATTEMPT_ID": "att_1", "SHOAL_NODE": "n1"}
HEADLESS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(1000,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""
"""Its first thread ends, as after a SIGKILL, while another thread lives on."""
STUCK = "import os, threading, time; threading.Thread(target=os.stat, args=({!r},)).start(); time.sleep(1000)"

INSIDE = """
import os, threading, time
os.mkfifo("pipe")
actions = {"file_actions": [(os.POSIX_SPAWN_OPEN, 0, "pipe", os.O_RDONLY, 0)]}
threading.Thread(target=os.posix_spawn, args=("/bin/true", ["true"], {}), kwargs=actions).start()
time.sleep(1000)
"""
"""A thread waits in the kernel for a child, which becomes a program once a byte arrives in a pipe."""

Launch = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Start a program that carries the marks and works in `tmp_path`. It is gone afterwards."""
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", code], env=ENVIRONMENT, cwd=tmp_path))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(10)


@pytest.fixture
def disk(tmp_path: Path, launch: Launch) -> Iterator[HungDisk]:
    """A hung disk, which goes away before a test waits for a process that is stuck at it."""
    missing = what_is_missing()
    if missing is not None:
        pytest.skip(missing)
    with hung_disk(tmp_path / "deaf") as folder:
        yield folder


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_process_lives_while_any_of_its_threads_does(tmp_path: Path, launch: Launch) -> None:
    process = launch(HEADLESS)
    until(lambda: state_of(process.pid) == "Z")
    assert process.pid in tree.descendants(os.getpid())
    assert tree.marked(MARKS, "/nowhere", None) == {process.pid}
    assert tree.marked(frozenset({b"NOBODY=has this"}), str(tmp_path), os.getuid()) == {process.pid}
    since = spool.start_ticks(process.pid)
    assert since is not None
    assert process.pid in tree.doubtful(str(tmp_path), since)
    assert process.poll() is None
    assert tree.kill_until_gone(lambda: tree.marked(MARKS, "/nowhere", None), timeout_s=10.0)
    assert process.wait(10) == -9


def test_unreaped_zombie_counts_as_gone(tmp_path: Path, launch: Launch) -> None:
    process = launch("pass")
    until(lambda: state_of(process.pid) == "Z")
    assert process.pid not in tree.descendants(os.getpid())
    assert tree.marked(MARKS, str(tmp_path), os.getuid()) == set()


def test_process_stuck_in_the_kernel_is_not_gone_after_its_first_thread(
    launch: Launch, disk: HungDisk
) -> None:
    process = launch(STUCK.format(str(disk.mount_point / "x")))
    until(lambda: "x" in disk.stuck_threads)

    def found() -> set[int]:
        return (tree.descendants(os.getpid()) & {process.pid}) | tree.marked(MARKS, "/nowhere", None)

    assert not tree.kill_until_gone(found, timeout_s=0.3)
    assert (state_of(process.pid), process.poll()) == ("Z", None)
    disk.release()
    assert tree.kill_until_gone(found, timeout_s=10.0)
    assert process.wait(10) == -9


def test_process_waits_in_the_kernel_if_any_of_its_threads_does(tmp_path: Path, launch: Launch) -> None:
    idle, inside = launch("import time; time.sleep(1000)"), launch(INSIDE)
    until(lambda: tree.is_any_in_kernel({inside.pid}))
    until(lambda: state_of(inside.pid) == "S")  # its first thread alone says nothing
    until(lambda: not tree.is_any_in_kernel({idle.pid, 1 << 22}))
    with (tmp_path / "pipe").open("wb"):
        until(lambda: not tree.is_any_in_kernel({idle.pid, inside.pid}))


def test_processes_in_cgroups_that_ranks_made_inside_are_found(tmp_path: Path) -> None:
    (tmp_path / "group" / "made" / "deep").mkdir(parents=True)
    for place, pid in (("group", 7), ("group/made", 8), ("group/made/deep", 9)):
        (tmp_path / place / "cgroup.procs").write_text(f"{pid}\n0\n")
    assert tree.pids_in_cgroups((str(tmp_path / "group"), str(tmp_path / "gone"))) == {7, 8, 9}


def test_without_a_free_descriptor_nothing_counts_as_gone(tmp_path: Path) -> None:
    (tmp_path / "cgroup.procs").write_text("")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/", os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        assert not tree.kill_until_gone(lambda: tree.pids_in_cgroups([str(tmp_path)]), timeout_s=0.2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert tree.kill_until_gone(lambda: tree.pids_in_cgroups([str(tmp_path)]), timeout_s=10.0)
