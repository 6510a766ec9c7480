"""How the ranks of a node are managed: when a spare starts, which ranks are replaced, and which are
killed.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.engines.fake import VirtualClock
from shoal.runtime.process import tree
from shoal.runtime.process.watcher import Process
from shoal.runtime.rank.board import BOARD_VARIABLE, RankBoard, RankStatus
from shoal.runtime.supervisor import rank_group
from shoal.runtime.supervisor.endings import Hang
from shoal.runtime.supervisor.environment import RendezvousRound
from shoal.runtime.supervisor.rank_group import HUNG_GONE_S, SILENT_S, SPARE_AGAIN_S, RankGroup
from tests.support.runtime.tasks import a_task_spec

KILL = os.kill


class FakeRankGroup:
    """A rank group whose processes are only recorded, and the calls that its hang detector receives."""

    def __init__(self, ranks: int = 1) -> None:
        self.slots: list[int] = []
        self.calls: list[object] = []
        self.shown: list[Process] = []
        self.cpu_s = 5.0
        self.stuck: list[Process] = []
        self.can_be_ended = True
        self.ended: list[Process] | None = None
        """The processes that were killed with their group; None for all."""
        self.has_no_processes = False
        self.signals: list[int] = []
        self.killed: list[int] = []
        self.living_pids: set[int] = set()
        self.blamed: list[Process] = []
        confinement: Any = SimpleNamespace(
            has_memory_for=lambda _: True,
            processes=lambda: set(self.living_pids),
            sandbox=None,
            cpu_seconds=lambda: self.cpu_s,
        )
        launcher: Any = SimpleNamespace(start_script=self._start, work="/nowhere/work")
        watcher: Any = SimpleNamespace(
            add=lambda *_: None,
            hold_output=lambda _: None,
            log_held_output=self.shown.append,
            log_message=self.calls.append,
            pipe_inodes=lambda _: set(),
            poll=self._end_stuck,
            has_closed_output=lambda _: True,
            blame=self.blamed.append,
            forget=lambda _: None,
        )
        self.meter = SimpleNamespace(variable="", fd=-1, steps_logged=0)
        meter: Any = self.meter
        task_spec = a_task_spec(max_restarts=3, ranks_per_node=ranks)
        self.clock = clock = VirtualClock()
        self.group = RankGroup(task_spec, confinement, launcher, watcher, clock, lambda *_: {}, meter)
        self.fd = self.group.inherited_fds[0]
        self.board = RankBoard(self.fd)
        out: Any = SimpleNamespace(
            begin=lambda *_: None,
            expect_spare=lambda: self.calls.append("a spare comes"),
            stuck_ranks=self._stuck,
            restart_clock=lambda: self.calls.append("wait"),
            check=lambda *, has_spare_settled: self.calls.append(has_spare_settled),
        )
        self.group.hang_detector = out

    def _start(
        self, run: str, environment: dict[str, str], *, inherited_fds: object
    ) -> tuple[int, tuple[()]]:
        if self.has_no_processes:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        self.slots.append(int(environment[BOARD_VARIABLE].partition(":")[2]))
        return 1_000_000 + len(self.slots), ()

    def _stuck(self) -> list[Process]:
        self.calls.append("stuck?")
        stuck, self.stuck = self.stuck, []
        return stuck

    def _end_stuck(self, timeout_s: float) -> None:
        self.clock.advance(timeout_s)
        if self.can_be_ended:
            for process in self.group.ranks if self.ended is None else self.ended:
                process.status = signal.SIGKILL

    def record_signal(self, pid: int, number: int) -> None:
        self.signals.append(number)
        if number == signal.SIGKILL:
            self.killed.append(pid)

    def check(self) -> list[object]:
        self.calls.clear()
        self.group.check()
        return list(self.calls)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRankGroup]:
    fake = FakeRankGroup()
    monkeypatch.setattr(os, "kill", fake.record_signal)
    monkeypatch.setattr(rank_group, "kill_group", lambda _: fake.signals.append(signal.SIGKILL))
    yield fake
    os.close(fake.fd)


@pytest.mark.parametrize(
    ("statuses", "left"),
    [
        ((RankStatus.DONE, RankStatus.DONE, RankStatus.GONE), [0, 1]),
        ((RankStatus.GONE, RankStatus.JOINED, RankStatus.WAITING), [1, 2]),
        ((RankStatus.GONE, RankStatus.GONE, RankStatus.GONE), []),
        ((RankStatus.JOINED, RankStatus.UNKNOWN, RankStatus.GONE), []),
    ],
)
def test_only_a_rank_that_left_its_group_for_good_is_killed(
    monkeypatch: pytest.MonkeyPatch, statuses: tuple[RankStatus, ...], left: list[int]
) -> None:
    """The others hold what was trained, and can go on with it."""
    fake = FakeRankGroup(ranks=3)
    ended: list[Process] = []
    fake.ended = ended
    monkeypatch.setattr(os, "kill", fake.record_signal)
    monkeypatch.setattr(rank_group, "kill_group", ended.append)
    fake.group.form(RendezvousRound(number=0, master_port=1))
    for slot, status in enumerate(statuses):
        fake.board.write_status(slot, status, 0, 7, 0)
    assert fake.group.clear()
    assert [process.rank for process in fake.group.ranks if process.status is None] == left
    os.close(fake.fd)


def test_hang_detector_is_told_when_a_spare_starts_and_when_it_waits(started: FakeRankGroup) -> None:
    started.group.form(RendezvousRound(number=0, master_port=1))
    assert started.check() == [], "ranks that report nothing are not checked, and have no spare"
    started.board.write_status(0, RankStatus.JOINED, 0, 0, 0)
    assert started.check() == ["a spare comes", False]
    assert started.check() == [False], "one spare is enough"
    assert started.slots == [0, 1]
    started.board.write_status(1, RankStatus.WAITING, -1, -1, 0)
    assert started.check() == [True]


def test_signs_tell_when_the_group_started_worked_and_wrote(started: FakeRankGroup) -> None:
    started.group.form(RendezvousRound(number=0, master_port=1))
    for rank in started.group.ranks:
        rank.note_output([b"before"], started.clock.now(), is_error=False)
        rank.status = signal.SIGKILL
    began_at = started.clock.now()
    started.group.form(RendezvousRound(number=1, master_port=1))
    signs = started.group.signs()
    assert (signs.rendezvous_round, signs.ran_at) == (1, began_at), "signs of an earlier group do not count"
    started.clock.advance(0.5)
    started.cpu_s += 0.3
    assert started.group.signs().ran_at == began_at + 0.5
    started.clock.advance(2.0)
    started.group.ranks[0].note_output([b"after"], started.clock.now(), is_error=True)
    assert started.group.signs().ran_at == began_at + 2.5, (
        "a line counts more than work, which may be imports"
    )
    started.clock.advance(1.0)
    assert started.group.signs().ran_at == began_at + 2.5


def test_ended_spare_is_logged_and_not_started_again_at_once(started: FakeRankGroup) -> None:
    started.group.form(RendezvousRound(number=0, master_port=1))
    started.board.write_status(0, RankStatus.JOINED, 0, 0, 0)
    started.check()
    spare = started.group._spare
    assert spare is not None
    spare.status = 3 << 8
    message = str(started.check()[0])
    assert message.startswith("the spare process of this node exited with code 3 while it waited")
    assert started.shown == [spare]
    assert started.check() == [False]
    started.clock.advance(SPARE_AGAIN_S)
    assert started.check() == ["a spare comes", False]


def test_failed_start_of_a_spare_harms_no_rank_and_is_tried_again(started: FakeRankGroup) -> None:
    started.group.form(RendezvousRound(number=0, master_port=1))
    started.board.write_status(0, RankStatus.JOINED, 0, 0, 0)
    started.has_no_processes = True
    message, is_settled = started.check()
    assert "no spare could be started" in str(message)
    assert is_settled is False
    assert started.check() == [False], "not at once"
    started.has_no_processes = False
    started.clock.advance(SPARE_AGAIN_S)
    assert started.check() == ["a spare comes", False]


def test_hang_detector_that_cannot_look_kills_no_rank(started: FakeRankGroup) -> None:
    def blind(**_: object) -> list[Process]:
        raise OSError(errno.ENFILE, "Too many open files in system")

    out: Any = started.group.hang_detector
    out.look = out.stuck = blind
    for number in (0, 1):
        started.group.form(RendezvousRound(number=number, master_port=1))
        started.board.write_status(0, RankStatus.JOINED, number, 7, 0)
        started.check()
    assert started.signals == []


def test_spare_of_a_later_group_starts_after_its_first_step(started: FakeRankGroup) -> None:
    started.group.form(RendezvousRound(number=1, master_port=1))
    started.board.write_status(0, RankStatus.JOINED, 1, 7, 0)
    assert started.check() == ["stuck?", False]
    started.board.write_joined(0, joined_ns=1, stepped_ns=2, first_step=8)
    assert started.check() == ["a spare comes", "stuck?", False]


def test_logged_step_counts_until_the_next_group_forms(started: FakeRankGroup) -> None:
    def has_stepped() -> bool:
        return started.group.has_stepped

    started.group.form(RendezvousRound(number=0, master_port=1))
    assert not has_stepped()
    started.meter.steps_logged += 1
    assert has_stepped()
    started.group.form(RendezvousRound(number=1, master_port=1))
    assert not has_stepped()


def test_rank_that_left_its_group_for_good_is_killed(started: FakeRankGroup) -> None:
    """The group would wait for it in vain, because its program is past `runtime.train`."""
    started.group.form(RendezvousRound(number=0, master_port=1))
    started.board.write_status(0, RankStatus.GONE, 0, 7, 0)
    assert started.group.clear()
    assert started.group.ranks[0].status is not None


def test_rank_after_its_last_step_reports_progress_and_survives(started: FakeRankGroup) -> None:
    started.group.form(RendezvousRound(number=0, master_port=1))
    started.board.write_status(0, RankStatus.DONE, 0, 7, 0)
    started.board.write_joined(0, joined_ns=1, stepped_ns=2, first_step=1)
    progress = started.group.progress()
    assert progress is not None
    assert progress.step == 7
    assert started.group.clear()
    assert started.group.ranks[0].status is None


def test_killed_rank_that_is_not_gone_is_no_survivor(started: FakeRankGroup) -> None:
    """Another node may have reported a failure of its own in the same moment."""
    started.group.form(RendezvousRound(number=0, master_port=1))
    started.board.write_status(0, RankStatus.JOINED, 0, 7, 0)
    assert started.group.send(signal.SIGKILL)
    assert started.group.clear(), "the group waits until it is gone"
    assert started.group.ranks[0].status is not None


def test_rank_killed_for_a_hang_has_a_minute_to_be_gone(started: FakeRankGroup) -> None:
    started.group.form(RendezvousRound(number=0, master_port=1))
    out: Any = started.group.hang_detector
    hung = Hang(description="no step", rank=0)

    def endless() -> list[Hang | None]:
        hangs = []
        for out.hang in (None, Hang(description="elsewhere"), hung):
            hangs.append(started.group.unkillable_hang)
        return hangs

    out.killed_at = started.clock.monotonic()
    started.clock.advance(HUNG_GONE_S)
    assert endless() == [None, None, None]
    started.clock.advance(0.1)
    assert endless() == [None, None, hung]


class TestStuck:
    """A rank that does not leave the group before, which the others have left."""

    @pytest.fixture
    def formed(self, started: FakeRankGroup) -> FakeRankGroup:
        started.group.form(RendezvousRound(number=0, master_port=1))
        started.board.write_status(0, RankStatus.JOINED, 0, 7, 0)
        started.group.form(RendezvousRound(number=1, master_port=1))
        started.stuck = list(started.group.ranks)
        return started

    def test_it_is_replaced_in_the_same_group(self, formed: FakeRankGroup) -> None:
        [old] = formed.group.ranks
        assert formed.check()[-1] == "wait"
        assert formed.signals == [signal.SIGSTOP, signal.SIGKILL, signal.SIGKILL, signal.SIGKILL]
        [new] = formed.group.ranks
        assert (new is old, old.is_needed, new.is_needed, new.rank) == (False, False, True, 0)
        place = formed.board.assignment(new.slot)
        assert place is not None
        assert (place.rendezvous_round, place.rank) == (1, 0)
        assert formed.blamed == []
        formed.clock.advance(SILENT_S + 1)
        recovery = formed.group.recovery(0.0, 0)
        assert recovery is not None
        assert recovery.surviving_ranks == 0

    def test_rank_that_joined_in_the_meantime_continues(self, formed: FakeRankGroup) -> None:
        """If it were killed now, both it and its successor would count as present."""
        [old] = formed.group.ranks
        formed.board.write_status(0, RankStatus.WAITING, 1, 7, 0)
        assert formed.check() == ["stuck?"]
        assert (formed.group.ranks, old.is_needed, old.status) == ([old], True, None)
        assert formed.signals == [signal.SIGSTOP, signal.SIGCONT]

    @pytest.mark.parametrize("status", [RankStatus.JOINED, RankStatus.DONE, RankStatus.GONE])
    def test_rank_that_ended_well_before_joining_is_replaced(
        self, formed: FakeRankGroup, status: RankStatus
    ) -> None:
        """The others would wait for it in vain, and nothing of it is left to stop or to kill."""
        [old] = formed.group.ranks
        formed.board.write_status(0, status, 0, 7, 0)
        old.status = 0
        assert "ended before it came to this group" in str(formed.check()[1])
        [new] = formed.group.ranks
        assert (new is old, old.is_needed, new.rank, formed.signals) == (False, False, 0, [])
        assert formed.blamed == []

    def test_rank_that_does_not_die_fails_the_group(self, formed: FakeRankGroup) -> None:
        [old] = formed.group.ranks
        formed.can_be_ended = False
        formed.check()
        assert (formed.group.ranks, formed.blamed) == ([old], [old])


class TestEnd:
    """What is killed, and waited for, when a group ends."""

    @pytest.fixture
    def forked(self, started: FakeRankGroup) -> Iterator[subprocess.Popen[bytes]]:
        """A forked rank, in a session of its own, that writes to none of the supervisor's pipes."""
        started.group.form(RendezvousRound(number=0, master_port=1))
        command = [sys.executable, "-c", "import time; time.sleep(1000)"]
        with subprocess.Popen(command, start_new_session=True) as child:
            started.living_pids.add(child.pid)
            started.board.write_process(0, child.pid, can_dump_stacks=False)
            yield child
            KILL(child.pid, signal.SIGKILL)

    def test_forked_rank_is_killed_and_waited_for_when_its_starter_is_gone(
        self, started: FakeRankGroup, forked: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`python train.py | tee log`: the pipeline ends at once, and the rank may still hold its device."""
        assert not started.group.clear(), "the fake kill did not end it, so it is not gone"
        assert forked.pid in started.killed

        def kill(pid: int, number: int) -> None:
            if pid == forked.pid:
                KILL(pid, number)
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

        monkeypatch.setattr(os, "kill", kill)
        assert started.group.clear()

    def test_without_a_free_descriptor_no_process_counts_as_gone(
        self, started: FakeRankGroup, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        started.group.form(RendezvousRound(number=0, master_port=1))
        looks = iter([True])
        monkeypatch.setattr(tree, "can_read_proc", lambda: next(looks, False))
        assert not started.group.clear(), "it could no longer look at processes during the kill"
        assert not started.group.clear()

    def test_later_process_with_the_same_pid_is_not_waited_for(
        self, started: FakeRankGroup, forked: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looks = iter([{forked.pid: 1}, {forked.pid: 2}])
        monkeypatch.setattr(tree, "start_ticks_of", lambda _: next(looks))
        assert started.group.clear()

    def test_pid_of_a_long_ended_rank_is_not_killed(
        self, started: FakeRankGroup, forked: subprocess.Popen[bytes]
    ) -> None:
        [old] = started.group.ranks
        old.pid, old.status = forked.pid, 0
        assert started.group.clear()
        assert (started.killed, started.signals) == ([], [])

    def test_processes_left_by_a_dead_rank_are_killed(
        self, started: FakeRankGroup, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        started.group.form(RendezvousRound(number=0, master_port=1))
        [old] = started.group.ranks
        old.status = 0
        monkeypatch.setattr(tree, "session_ids", lambda _: {1_000_777: old.pid, 1_000_778: 5})
        assert started.group.clear()
        assert (started.killed, started.signals) == ([1_000_777], [signal.SIGKILL] * 2)
