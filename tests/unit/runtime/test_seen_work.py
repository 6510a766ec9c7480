"""Processor time where nothing but the process table tells it."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable

import pytest

from shoal.runtime import tree
from shoal.runtime.confine import seen_work
from shoal.runtime.confine.seen_work import SeenWork
from tests.support.real_plane import until

WORK = "import time\nwhile time.process_time() < 0.3: pass\n"
WAIT = "import sys\nprint(flush=True)\nsys.stdin.read()\n"


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], subprocess.Popen[bytes]]:
    monkeypatch.setattr(seen_work, "SCAN_S", 0.0)

    def start(program: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", program]
        return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    return start


def test_who_works_is_told_from_who_waits(begin: Callable[[str], subprocess.Popen[bytes]]) -> None:
    work = SeenWork()
    before = work.seconds()
    with begin(WORK + WAIT) as child:
        assert child.stdout is not None
        child.stdout.readline()
        busy = work.seconds()
        assert busy - before >= 0.25
        assert work.seconds() == busy, "it only waits now"


def test_what_has_ended_takes_nothing_back(begin: Callable[[str], subprocess.Popen[bytes]]) -> None:
    work = SeenWork()
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
    work = SeenWork()
    with begin(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {WORK!r}])\n{WAIT}") as child:
        before = work.seconds()
        until(lambda: work.seconds() - before >= 0.25, "the work of a child that is gone is seen")
        assert child.stdout is not None
        child.stdout.readline()


def test_who_cannot_look_counts_those_that_are_known(
    begin: Callable[[str], subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def blind(_: int) -> set[int]:
        raise OSError(errno.ENFILE, "Too many open files in system")

    work = SeenWork()
    with begin(WAIT) as child:
        assert child.stdout is not None
        child.stdout.readline()
        seen = work.seconds()
        monkeypatch.setattr(tree, "descendants", blind)
        assert work.seconds() >= seen
