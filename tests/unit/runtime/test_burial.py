"""What is left of a share whose keeper is gone, with real supervisors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.runtime import spool
from shoal.runtime.burial import NOT_YET, OVER, USAGE, bury, main
from tests.support.shares import an_order, shares_in, until


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
        assert bury(running.share, timeout_s=0.3) == NOT_YET
        os.close(lock)


def test_of_a_share_whose_files_were_swept_away_nobody_says_that_it_is_over(tmp_path: Path) -> None:
    with shares_in(tmp_path) as make:
        running = make(an_order(run="setsid sleep 1000 & wait"))
        running.spawn()
        until(lambda: os.path.exists(running.share.started))  # noqa: PTH110
        for name in ("order.json", "lock", "claimed", "started"):
            (running.directory / name).unlink()
        assert bury(running.share, timeout_s=0.3) == NOT_YET
