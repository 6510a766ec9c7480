"""Whether a launcher, or a member of the job's process group, still runs after a rank's script has ended."""

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
from shoal.runtime.supervisor.unfinished_launchers import PATIENCE_S, rank_with_unfinished_launcher
from shoal.runtime.warm import launchers
from shoal.runtime.warm.launcher_lock import lock_offset

HOLDS = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.lockf(file, fcntl.LOCK_EX, 1, int(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(path: Path, *, rank: int, generation: int) -> Iterator[subprocess.Popen[str]]:
    place = lock_offset({"SHOAL_RANK": str(rank), "SHOAL_RENDEZVOUS_ROUND": str(generation)})
    command = [sys.executable, "-c", HOLDS, str(path), str(place)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def rank_reported(folder: Path, generation: int = 0) -> tuple[int | None, float]:
    """Return the rank with an unfinished launcher, and after how many seconds that was known."""
    clock = VirtualClock()
    began = clock.monotonic()
    return rank_with_unfinished_launcher(
        str(folder), generation, clock, clock.advance
    ), clock.monotonic() - began


@pytest.mark.parametrize("name", [launchers.LAUNCHING, launchers.STEPS, launchers.MEMBERS])
def test_rank_whose_lock_is_held_is_found_after_a_moment(tmp_path: Path, name: str) -> None:
    with held(tmp_path / name, rank=7, generation=2):
        rank, waited_s = rank_reported(tmp_path, 2)
        assert rank == 7
        assert PATIENCE_S <= waited_s < 2 * PATIENCE_S
        assert rank_reported(tmp_path, 1) == (None, 0.0), "the rank group is an earlier one"
    assert rank_reported(tmp_path, 2) == (None, 0.0), "the process with the lock has ended"


def test_launcher_that_ends_within_a_moment_is_not_reported(tmp_path: Path) -> None:
    clock = VirtualClock()
    with held(tmp_path / launchers.LAUNCHING, rank=0, generation=0) as process:

        def wait(seconds: float) -> None:
            clock.advance(seconds)
            process.kill()
            process.wait()

        assert rank_with_unfinished_launcher(str(tmp_path), 0, clock, wait) is None


@pytest.mark.parametrize("kind", ["missing", "a pipe", "a link", "a folder"])
def test_file_that_is_no_lock_file_holds_nothing(tmp_path: Path, kind: str) -> None:
    path = tmp_path / launchers.LAUNCHING
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a link":
        path.symlink_to("/dev/zero")
    elif kind == "a folder":
        path.mkdir()
    assert rank_reported(tmp_path) == (None, 0.0)


def test_check_never_takes_the_lock(tmp_path: Path) -> None:
    path = tmp_path / launchers.LAUNCHING
    path.touch()
    assert rank_reported(tmp_path) == (None, 0.0)
    with path.open("a") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
