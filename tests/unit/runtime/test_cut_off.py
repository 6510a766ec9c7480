"""Whether a launcher, or a member of the job's process group, still runs when a rank's script has ended."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.engines.fake import VirtualClock
from shoal.runtime.cut_off import PATIENCE_S, rank_at_work
from shoal.runtime.warm import names
from shoal.runtime.warm.one_launcher import place_of

HOLDS = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.lockf(file, fcntl.LOCK_EX, 1, int(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(path: Path, *, rank: int, generation: int) -> Iterator[subprocess.Popen[str]]:
    place = place_of({"SHOAL_RANK": str(rank), "SHOAL_GENERATION": str(generation)})
    command = [sys.executable, "-c", HOLDS, str(path), str(place)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def at_work(folder: Path, generation: int = 0) -> tuple[int | None, float]:
    """The rank, and after how many seconds that was known."""
    clock = VirtualClock()
    began = clock.monotonic()
    return rank_at_work(str(folder), generation, clock, clock.advance), clock.monotonic() - began


@pytest.mark.parametrize("name", [names.LAUNCHING, names.MEMBERS])
def test_rank_whose_lock_is_held_is_found_after_a_moment(tmp_path: Path, name: str) -> None:
    with held(tmp_path / name, rank=7, generation=2):
        rank, waited_s = at_work(tmp_path, 2)
        assert rank == 7
        assert PATIENCE_S <= waited_s < 2 * PATIENCE_S
        assert at_work(tmp_path, 1) == (None, 0.0), "a group of ranks from before"
    assert at_work(tmp_path, 2) == (None, 0.0), "its process has ended"


def test_launcher_that_ends_within_a_moment_is_not_at_work(tmp_path: Path) -> None:
    clock = VirtualClock()
    with held(tmp_path / names.LAUNCHING, rank=0, generation=0) as process:

        def wait(seconds: float) -> None:
            clock.advance(seconds)
            process.kill()
            process.wait()

        assert rank_at_work(str(tmp_path), 0, clock, wait) is None


@pytest.mark.parametrize("kind", ["missing", "a pipe", "a link", "a folder"])
def test_file_that_is_no_lock_file_holds_nothing(tmp_path: Path, kind: str) -> None:
    path = tmp_path / names.LAUNCHING
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a link":
        path.symlink_to("/dev/zero")
    elif kind == "a folder":
        path.mkdir()
    assert at_work(tmp_path) == (None, 0.0)


def test_lock_is_only_looked_at(tmp_path: Path) -> None:
    path = tmp_path / names.LAUNCHING
    path.touch()
    assert at_work(tmp_path) == (None, 0.0)
    with path.open("a") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
