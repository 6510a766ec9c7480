"""What a supervisor does with the lines of its processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.clock import SystemClock
from shoal.runtime.launch import Pipes
from shoal.runtime.logs import LogFile
from shoal.runtime.rules import LogRules
from shoal.runtime.watch import HELD_LINES, Process, Watcher


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
        self.watcher.turn(0.0)

    def said(self) -> list[str]:
        return [line.split(" ", 1)[1] for line in self.log.read_text().splitlines()]


def test_process_that_waits_to_be_a_rank_writes_nothing_into_the_log(tmp_path: Path) -> None:
    spare = Watched(tmp_path, None)
    spare.watcher.hold(spare.process)
    spare.writes("Initializing a new model from scratch\n")
    assert spare.said() == []
    spare.process.rank, spare.process.held = 3, None
    spare.writes("step 8\n")
    assert spare.said() == ["3 o step 8"]


def test_last_lines_of_a_process_that_ended_while_it_waited_are_shown(tmp_path: Path) -> None:
    spare = Watched(tmp_path, None)
    spare.watcher.hold(spare.process)
    spare.writes("".join(f"line {number}\n" for number in range(100)))
    os.write(spare.err, b"ModuleNotFoundError: No module named 'data'\n")
    spare.watcher.show(spare.process)
    told = spare.said()
    assert len(told) == HELD_LINES
    assert told[-2:] == ["- s line 99", "- s ModuleNotFoundError: No module named 'data'"]


def test_first_word_of_a_rank_is_timed(tmp_path: Path) -> None:
    rank = Watched(tmp_path, 0)
    told = [rank.process.spoke_at]
    for text in ("epoch 1\n", "epoch 2\n"):
        rank.writes(text)
        told.append(rank.process.spoke_at)
    assert told[0] is None
    assert told[1] is not None
    assert told[2] == told[1]


@pytest.mark.parametrize(("code", "is_shown"), [(0, False), (3, True)])
def test_last_lines_of_a_helper_are_shown_if_it_exits_with_an_error(
    tmp_path: Path, code: int, *, is_shown: bool
) -> None:
    helper = Watched(tmp_path, None)
    helper.watcher.hold(helper.process)
    helper.watcher._processes[pid := os.fork()] = helper.process
    if pid == 0:
        os._exit(code)
    helper.writes("starts stay cold\n")
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    helper.watcher.turn(0.0)
    assert helper.process.status == code << 8
    assert helper.said() == (["- s starts stay cold"] if is_shown else [])
