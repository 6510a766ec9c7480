"""What a supervisor does with the lines of its processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.clock import SystemClock
from shoal.runtime.process.launcher import Pipes
from shoal.runtime.process.log import LogFile
from shoal.runtime.process.log_rules import LogRules
from shoal.runtime.process.watcher import HELD_LINES, Process, Watcher


class Watched:
    """A process whose streams are pipes of the test."""

    def __init__(self, tmp_path: Path, rank: int | None) -> None:
        self.log, wake = tmp_path / "log", os.pipe()
        clock = SystemClock()
        self.watcher = Watcher(LogFile(str(self.log), 1 << 20, clock), LogRules(()), wake[0], clock)
        (out, self.out), (err, self.err) = os.pipe(), os.pipe()
        self.process = Process(1_000_000, rank, is_needed=rank is not None)
        self.watcher.add(self.process, Pipes(stdout=out, stderr=err))

    def writes(self, text: str) -> None:
        os.write(self.out, text.encode())
        self.watcher.poll(0.0)

    def log_lines(self) -> list[str]:
        return [line.split(" ", 1)[1] for line in self.log.read_text().splitlines()]


def test_output_of_a_waiting_spare_is_not_logged(tmp_path: Path) -> None:
    spare = Watched(tmp_path, None)
    spare.watcher.hold_output(spare.process)
    spare.writes("Initializing a new model from scratch\n")
    assert spare.log_lines() == []
    spare.process.rank, spare.process.held_lines = 3, None
    spare.writes("step 8\n")
    assert spare.log_lines() == ["3 o step 8"]


def test_last_lines_of_an_ended_spare_are_logged(tmp_path: Path) -> None:
    spare = Watched(tmp_path, None)
    spare.watcher.hold_output(spare.process)
    spare.writes("".join(f"line {number}\n" for number in range(100)))
    os.write(spare.err, b"ModuleNotFoundError: No module named 'data'\n")
    spare.watcher.log_held_output(spare.process)
    message = spare.log_lines()
    assert len(message) == HELD_LINES
    assert message[-2:] == ["- s line 99", "- s ModuleNotFoundError: No module named 'data'"]


def test_first_output_of_a_rank_is_timed(tmp_path: Path) -> None:
    rank = Watched(tmp_path, 0)
    times = [rank.process.first_output_at]
    for text in ("epoch 1\n", "epoch 2\n"):
        rank.writes(text)
        times.append(rank.process.first_output_at)
    assert times[0] is None
    assert times[1] is not None
    assert times[2] == times[1]


@pytest.mark.parametrize(("code", "is_shown"), [(0, False), (3, True)])
def test_last_lines_of_a_helper_are_logged_if_it_exits_with_an_error(
    tmp_path: Path, code: int, *, is_shown: bool
) -> None:
    helper = Watched(tmp_path, None)
    helper.watcher.hold_output(helper.process)
    helper.watcher._processes[pid := os.fork()] = helper.process
    if pid == 0:
        os._exit(code)
    helper.writes("starts stay cold\n")
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    helper.watcher.poll(0.0)
    assert helper.process.status == code << 8
    assert helper.log_lines() == (["- s starts stay cold"] if is_shown else [])
