"""CPU time that only the process table shows."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable

import pytest

from shoal.runtime.confine import resource_limits
from shoal.runtime.confine.resource_limits import ObservedCpuTime
from shoal.runtime.process import tree
from tests.support.planes.real import until

WORK = "import time\nwhile time.process_time() < 0.3: pass\n"
WAIT = "import sys\nprint(flush=True)\nsys.stdin.read()\n"


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], subprocess.Popen[bytes]]:
    monkeypatch.setattr(resource_limits, "SCAN_S", 0.0)

    def start(program: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", program]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    return start


def test_working_process_is_distinguished_from_a_waiting_one(
    begin: Callable[[str], subprocess.Popen[bytes]],
) -> None:
    work = ObservedCpuTime()
    before = work.seconds()
    with begin(WORK + WAIT) as child:
        assert child.stdout is not None
        child.stdout.readline()
        busy = work.seconds()
        assert busy - before >= 0.25
        assert work.seconds() == busy, "it only waits now"


def test_what_has_ended_takes_nothing_back(begin: Callable[[str], subprocess.Popen[bytes]]) -> None:
    work = ObservedCpuTime()
    with begin(WORK + WAIT) as child:
        assert child.stdout is not None
        child.stdout.readline()
        busy = work.seconds()
    with begin(WAIT) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert work.seconds() >= busy


def test_children_between_two_looks_count_once_they_were_waited_for(
    begin: Callable[[str], subprocess.Popen[bytes]],
) -> None:
    work = ObservedCpuTime()
    with begin(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {WORK!r}])\n{WAIT}") as child:
        before = work.seconds()
        until(lambda: work.seconds() - before >= 0.25, "the work of a child that is gone is seen")
        assert child.stdout is not None
        child.stdout.readline()


def test_failed_scan_counts_the_processes_found_before(
    begin: Callable[[str], subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def blind(_: int) -> set[int]:
        raise OSError(errno.ENFILE, "Too many open files in system")

    work = ObservedCpuTime()
    with begin(WAIT) as child:
        assert child.stdout is not None
        child.stdout.readline()
        seen = work.seconds()
        monkeypatch.setattr(tree, "descendants", blind)
        assert work.seconds() >= seen
