"""What is left of a share whose keeper is gone, with real supervisors."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.runtime import spool, tree
from shoal.runtime.burial import LEFT, NOT_YET, OVER, USAGE, bury, main
from tests.support.shares import an_order, processes_with, shares_in, until


def test_a_share_that_was_never_prepared_is_over(tmp_path: Path) -> None:
    assert main([str(tmp_path), "att_1", "n0", "0"]) == OVER
    assert main([str(tmp_path), "att_1", "n0"]) == USAGE


def test_the_supervisor_and_its_ranks_are_ended(tmp_path: Path) -> None:
    with shares_in(tmp_path) as make:
        running = make(an_order(run="trap '' TERM; sleep 1000 & wait"))
        running.spawn()
        until(lambda: os.path.exists(running.share.started))  # noqa: PTH110
        assert bury(running.share) == OVER
        assert not spool.is_locked(running.share)
        running.processes[0].wait(10)


def test_one_that_cannot_be_told_by_its_command_line_is_ended_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "kill_supervisors", lambda _: None)
    with shares_in(tmp_path) as make:
        running = make(an_order(run="sleep 1000"))
        running.spawn()
        until(lambda: os.path.exists(running.share.started))  # noqa: PTH110
        assert bury(running.share) == OVER
        running.processes[0].wait(10)


def test_a_supervisor_that_comes_later_finds_nothing_to_do(tmp_path: Path) -> None:
    with shares_in(tmp_path) as make:
        running = make(an_order())
        assert bury(running.share) == OVER
        process = running.spawn()
        process.wait(30)
        assert not os.path.exists(running.share.started)  # noqa: PTH110


def test_somebody_who_holds_on_is_not_said_to_be_gone(tmp_path: Path) -> None:
    with shares_in(tmp_path) as make:
        running = make(an_order())
        lock = spool.take_lock(running.share)
        assert lock is not None
        assert bury(running.share, timeout_s=0.3) == LEFT
        os.close(lock)


def test_what_does_not_die_is_told_from_what_nobody_can_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with shares_in(tmp_path) as make, monkeypatch.context() as patch:
        patch.setattr(spool, "kill_leftovers", lambda *_: False)
        running = make(an_order())
        assert bury(running.share, timeout_s=0.3) == LEFT
        assert "something of it does not die" in capfd.readouterr().err
        (running.directory / "order.json").unlink()
        assert bury(running.share, timeout_s=0.3) == NOT_YET
        assert "its order is gone" in capfd.readouterr().err


def test_of_a_share_whose_files_were_swept_away_nobody_says_that_it_is_over(tmp_path: Path) -> None:
    with shares_in(tmp_path) as make:
        running = make(an_order(run="setsid sleep 1000 & wait"))
        running.spawn()
        until(lambda: os.path.exists(running.share.started))  # noqa: PTH110
        for name in ("order.json", "lock", "claimed", "started"):
            (running.directory / name).unlink()
        assert bury(running.share, timeout_s=0.3) == NOT_YET


def test_one_without_marks_that_may_be_of_the_share_is_neither_killed_nor_passed_over(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mark = f"sleep {random.randrange(10**6, 10**9)}"
    with shares_in(tmp_path) as make:
        running = make(an_order(run=f"env -i setsid {mark} & wait", confinement=()))
        running.spawn()
        until(lambda: os.path.exists(running.share.started))  # noqa: PTH110
        until(lambda: len(processes_with(mark.replace(" ", "\0"))) == 1)
        [left] = processes_with(mark.replace(" ", "\0"))
        assert bury(running.share, timeout_s=1.0) == NOT_YET
        assert f"processes [{left}] may be of it" in capfd.readouterr().err
        os.kill(left, signal.SIGKILL)
        assert bury(running.share) == OVER


def test_who_hides_its_environment_is_in_doubt_unless_it_is_older_or_shoals_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = [sys.executable, "-c", "import time; time.sleep(60)", "-m", "shoal.runtime.keep", "n1"]
    with subprocess.Popen(["/bin/sleep", "60"], cwd="/") as other, subprocess.Popen(own, cwd="/") as keeper:
        try:
            until(lambda: b"shoal" in Path(f"/proc/{keeper.pid}/cmdline").read_bytes())
            both = {other.pid, keeper.pid}
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
            keeper.kill()
