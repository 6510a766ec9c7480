"""Stacks of processes that cannot, or do not, write their stacks themselves."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.runtime.process import tree
from shoal.runtime.process.watcher import Process
from shoal.runtime.rank.board import RankBoard, RankStatus
from shoal.runtime.supervisor import hang_snapshot
from tests.support.runtime.tasks import SOURCE, open_files, until

PROGRAM = """
import os, sys, time
sys.path.insert(0, sys.argv[4])
from shoal.runtime.rank.board import RankBoard
from shoal.runtime.rank.membership import register_stack_dump
fd, slot = int(sys.argv[1]), int(sys.argv[2])
board = RankBoard(fd)
board.write_process(slot, os.getpid(), can_dump_stacks=register_stack_dump(fd, slot))
board.write_status(slot, 2, 0, 7, 1)
def stuck():
    time.sleep(60)
def saves():
    # Waits for a thread, in a line of Shoal's own.
    source = "import threading\\nthreading.Event().wait(60)"
    exec(compile(source, "/lib/shoal/runtime/rank/checkpoint/background_save.py", "exec"), {})
def torch_like():
    exec(compile("import time\\ntime.sleep(60)", "/lib/torch/distributed/c10d.py", "exec"), {})
{"waits": torch_like, "saves": saves, "stuck": stuck}[sys.argv[3]]()
"""


class Ranks:
    """Processes on one board."""

    def __init__(self) -> None:
        self.fd, self.board = RankBoard.create()
        self.processes: list[Process] = []
        self._children: list[subprocess.Popen[bytes]] = []

    def start(self, how: str) -> int:
        slot = len(self.processes)
        child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(self.fd), str(slot), how, SOURCE], pass_fds=(self.fd,)
        )
        self._children.append(child)
        process = Process(child.pid, slot)
        process.slot = slot
        self.processes.append(process)
        until(lambda: self.board.heartbeat(slot).status is RankStatus.JOINED)
        time.sleep(0.2)  # until it has reached its last line
        return child.pid

    def look(self, path: str = "") -> hang_snapshot.HangSnapshot:
        pids = {child.pid for child in self._children}
        return hang_snapshot.take_snapshot(
            self.processes, self.board, self.fd, pids, path, has_own_namespace=False
        )

    def close(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()
        os.close(self.fd)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


@pytest.fixture(params=["spied", "own words"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "own words":
        monkeypatch.setattr(hang_snapshot, "spy_program", lambda _: None)
    return str(request.param)


def test_rank_that_does_not_wait_while_others_do_is_named_with_its_place(ranks: Ranks, way: str) -> None:
    for how in ("waits", "stuck", "waits"):
        ranks.start(how)
    seen = ranks.look()
    assert [process.rank for process in seen.culprits] == [1], seen
    hang = seen.hang("nothing moved")
    assert hang.rank == 1
    assert hang.frame.startswith("stuck (")
    assert not seen.waits_for_others
    assert all(one.frame for _, one in seen.stacks)


def test_ranks_that_all_wait_hang_for_a_reason_elsewhere(ranks: Ranks, way: str) -> None:
    ranks.start("waits")
    ranks.start("waits")
    seen = ranks.look()
    assert seen.waits_for_others
    assert len(seen.culprits) == 2


def test_rank_that_waits_for_a_save_under_way_waits_for_others(ranks: Ranks, way: str) -> None:
    ranks.start("saves")
    ranks.start("stuck")
    seen = ranks.look()
    assert [process.rank for process in seen.culprits] == [1]
    assert [one.is_saving for _, one in seen.stacks] == [True, False]
    assert seen.is_saving


def test_rank_without_readable_stacks_is_no_culprit(ranks: Ranks) -> None:
    ranks.start("waits")
    ranks.start("waits")
    ranks.board.write_process(1, 1 << 22, can_dump_stacks=False)  # no process has that number
    seen = ranks.look()
    assert not seen.stacks[1][1].frame
    assert seen.waits_for_others


def test_stopped_rank_is_read_where_py_spy_is_and_excused_where_not(ranks: Ranks, way: str) -> None:
    ranks.start("waits")
    os.kill(ranks.start("stuck"), signal.SIGSTOP)
    until(lambda: bool(ranks.look().stopped))
    seen = ranks.look()
    assert [process.rank for process in seen.culprits] == [1]
    text = seen.stacks[1][1].text
    assert ("stuck (" in text) if way == "spied" else ("it is stopped and cannot answer" in text)


def test_stopped_rank_is_distinguished_from_one_with_a_stopped_child(ranks: Ranks) -> None:
    ranks.start("waits")
    pid = ranks.start("stuck")
    helper = subprocess.Popen(["sleep", "60"])
    try:
        os.kill(helper.pid, signal.SIGSTOP)
        pids = {process.pid for process in ranks.processes} | {helper.pid}
        until(lambda: tree.stopped_by_signal(pids) == {helper.pid})
        assert (
            hang_snapshot.stopped_slots(ranks.processes, ranks.board, pids, has_own_namespace=False)
            == frozenset()
        )
        os.kill(pid, signal.SIGSTOP)
        until(
            lambda: (
                hang_snapshot.stopped_slots(ranks.processes, ranks.board, pids, has_own_namespace=False)
                == frozenset({1})
            )
        )
    finally:
        helper.kill()
        helper.wait()


def test_answers_given_before_are_not_read_again(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_snapshot, "spy_program", lambda _: None)
    ranks.start("stuck")
    first, second = ranks.look(), ranks.look()
    assert first.stacks[0][1].text.count("in stuck") == second.stacks[0][1].text.count("in stuck") == 1


def test_program_that_cannot_read_processes_is_quoted(ranks: Ranks, tmp_path: Path) -> None:
    spy = tmp_path / "py-spy"
    spy.write_text("#!/bin/sh\necho 'Error: Permission Denied'\nexit 1\n")
    spy.chmod(0o755)
    pid = ranks.start("stuck")
    stacks = hang_snapshot.take_stacks(
        [hang_snapshot.StackTarget(pid=pid, slot=0, can_dump_stacks=False)], str(spy), ranks.fd
    )
    assert stacks[0].text.endswith("py-spy says: Error: Permission Denied")


def test_process_beside_us_is_not_taken_for_one_inside_of_the_same_number() -> None:
    pid = os.getpid()
    assert hang_snapshot.host_pids([pid, 0], [pid]) == {pid: pid}
    assert hang_snapshot.host_pids([pid], [pid], has_own_namespace=True) == {}


@pytest.mark.parametrize("name", ["memfd_create", "posix_spawn"])
def test_stacks_for_which_nothing_is_left_are_excused(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, name, full)
    subjects = [
        hang_snapshot.StackTarget(pid=os.getpid(), slot=slot, can_dump_stacks=False) for slot in range(2)
    ]
    stacks = hang_snapshot.take_stacks(subjects, "/nowhere/py-spy", ranks.fd)
    assert all("could not be started" in one.text for one in stacks.values())
    assert not any("memfd:stacks" in name for name in open_files())
