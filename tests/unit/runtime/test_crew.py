"""How the ranks of a node are looked after: when a spare is started, and who hears of it."""

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
from shoal.runtime import crew, tree
from shoal.runtime.board import VARIABLE, Board, Standing
from shoal.runtime.crew import HUNG_GONE_S, SILENT_S, SPARE_AGAIN_S, Crew
from shoal.runtime.ending import Hang
from shoal.runtime.environment import Generation
from shoal.runtime.watch import Process
from tests.support.shares import an_order

KILL = os.kill


class Started:
    """A crew whose processes are only written down, and what its lookout is told."""

    def __init__(self, ranks: int = 1) -> None:
        self.slots: list[int] = []
        self.heard: list[object] = []
        self.shown: list[Process] = []
        self.cpu_s = 5.0
        self.stuck: list[Process] = []
        self.can_be_ended = True
        self.ended: list[Process] | None = None
        """Who was killed with its group; None: everybody."""
        self.has_no_processes = False
        self.signals: list[int] = []
        self.killed: list[int] = []
        self.found: set[int] = set()
        self.blamed: list[Process] = []
        confinement: Any = SimpleNamespace(
            has_memory_for=lambda _: True,
            processes=lambda: set(self.found),
            sandbox=None,
            cpu_seconds=lambda: self.cpu_s,
        )
        launcher: Any = SimpleNamespace(start_script=self._start, work="/nowhere/work")
        watcher: Any = SimpleNamespace(
            add=lambda *_: None,
            hold=lambda _: None,
            show=self.shown.append,
            say=self.heard.append,
            pipes_of=lambda _: set(),
            turn=self._end_stuck,
            is_silent=lambda _: True,
            blame=self.blamed.append,
            forget=lambda _: None,
        )
        self.meter = SimpleNamespace(variable="", fd=-1, steps_heard=0)
        meter: Any = self.meter
        order = an_order(max_restarts=3, ranks_per_node=ranks)
        self.clock = clock = VirtualClock()
        self.crew = Crew(order, confinement, launcher, watcher, clock, lambda *_: {}, meter)
        self.fd = self.crew.kept_fds[0]
        self.board = Board(self.fd)
        out: Any = SimpleNamespace(
            begin=lambda *_: None,
            expect_spare=lambda: self.heard.append("a spare comes"),
            stuck=self._stuck,
            wait_again=lambda: self.heard.append("wait"),
            look=lambda *, has_spare_settled: self.heard.append(has_spare_settled),
        )
        self.crew.lookout = out

    def _start(self, run: str, environment: dict[str, str], *, keep: object) -> tuple[int, tuple[()]]:
        if self.has_no_processes:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        self.slots.append(int(environment[VARIABLE].partition(":")[2]))
        return 1_000_000 + len(self.slots), ()

    def _stuck(self) -> list[Process]:
        self.heard.append("stuck?")
        found, self.stuck = self.stuck, []
        return found

    def _end_stuck(self, timeout_s: float) -> None:
        self.clock.advance(timeout_s)
        if self.can_be_ended:
            for process in self.crew.ranks if self.ended is None else self.ended:
                process.status = signal.SIGKILL

    def hear_signal(self, pid: int, number: int) -> None:
        self.signals.append(number)
        if number == signal.SIGKILL:
            self.killed.append(pid)

    def look_after(self) -> list[object]:
        self.heard.clear()
        self.crew.look_after()
        return list(self.heard)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    made = Started()
    monkeypatch.setattr(os, "kill", made.hear_signal)
    monkeypatch.setattr(crew, "kill_group", lambda _: made.signals.append(signal.SIGKILL))
    yield made
    os.close(made.fd)


@pytest.mark.parametrize(
    ("standings", "left"),
    [
        ((Standing.DONE, Standing.DONE, Standing.GONE), [0, 1]),
        ((Standing.GONE, Standing.JOINED, Standing.WAITING), [1, 2]),
        ((Standing.GONE, Standing.GONE, Standing.GONE), []),
        ((Standing.JOINED, Standing.UNKNOWN, Standing.GONE), []),
    ],
)
def test_rank_that_has_left_its_group_for_good_is_ended_alone(
    monkeypatch: pytest.MonkeyPatch, standings: tuple[Standing, ...], left: list[int]
) -> None:
    """The others have what was trained, and can go on with it."""
    made = Started(ranks=3)
    ended: list[Process] = []
    made.ended = ended
    monkeypatch.setattr(os, "kill", made.hear_signal)
    monkeypatch.setattr(crew, "kill_group", ended.append)
    made.crew.form(Generation(number=0, master_port=1))
    for slot, standing in enumerate(standings):
        made.board.say(slot, standing, 0, 7, 0)
    assert made.crew.clear()
    assert [process.rank for process in made.crew.ranks if process.status is None] == left
    os.close(made.fd)


def test_lookout_hears_of_a_spare_when_it_starts_and_when_it_waits(started: Started) -> None:
    started.crew.form(Generation(number=0, master_port=1))
    assert started.look_after() == [], "ranks that say nothing are not looked at, and have no spare"
    started.board.say(0, Standing.JOINED, 0, 0, 0)
    assert started.look_after() == ["a spare comes", False]
    assert started.look_after() == [False], "one is enough"
    assert started.slots == [0, 1]
    started.board.say(1, Standing.WAITING, -1, -1, 0)
    assert started.look_after() == [True]


def test_group_shows_when_it_was_started_and_when_it_worked_and_wrote_again(started: Started) -> None:
    started.crew.form(Generation(number=0, master_port=1))
    for rank in started.crew.ranks:
        rank.hear([b"before"], started.clock.now(), is_error=False)
        rank.status = signal.SIGKILL
    began_at = started.clock.now()
    started.crew.form(Generation(number=1, master_port=1))
    signs = started.crew.signs()
    assert (signs.generation, signs.ran_at) == (1, began_at), "what those before them did says nothing"
    started.clock.advance(0.5)
    started.cpu_s += 0.3
    assert started.crew.signs().ran_at == began_at + 0.5
    started.clock.advance(2.0)
    started.crew.ranks[0].hear([b"after"], started.clock.now(), is_error=True)
    assert started.crew.signs().ran_at == began_at + 2.5, "a line says more than work, as of imports"
    started.clock.advance(1.0)
    assert started.crew.signs().ran_at == began_at + 2.5


def test_spare_that_ends_is_told_of_and_not_started_again_at_once(started: Started) -> None:
    started.crew.form(Generation(number=0, master_port=1))
    started.board.say(0, Standing.JOINED, 0, 0, 0)
    started.look_after()
    spare = started.crew._spare
    assert spare is not None
    spare.status = 3 << 8
    told = str(started.look_after()[0])
    assert told.startswith("the spare process of this node exited with code 3 while it waited")
    assert started.shown == [spare]
    assert started.look_after() == [False]
    started.clock.advance(SPARE_AGAIN_S)
    assert started.look_after() == ["a spare comes", False]


def test_spare_that_cannot_be_started_is_tried_again_and_costs_nobody_anything(started: Started) -> None:
    started.crew.form(Generation(number=0, master_port=1))
    started.board.say(0, Standing.JOINED, 0, 0, 0)
    started.has_no_processes = True
    told, is_settled = started.look_after()
    assert "no spare could be started" in str(told)
    assert is_settled is False
    assert started.look_after() == [False], "not at once"
    started.has_no_processes = False
    started.clock.advance(SPARE_AGAIN_S)
    assert started.look_after() == ["a spare comes", False]


def test_lookout_that_cannot_see_ends_nobody(started: Started) -> None:
    def blind(**_: object) -> list[Process]:
        raise OSError(errno.ENFILE, "Too many open files in system")

    out: Any = started.crew.lookout
    out.look = out.stuck = blind
    for number in (0, 1):
        started.crew.form(Generation(number=number, master_port=1))
        started.board.say(0, Standing.JOINED, number, 7, 0)
        started.look_after()
    assert started.signals == []


def test_spare_of_a_later_group_comes_after_its_first_step(started: Started) -> None:
    started.crew.form(Generation(number=1, master_port=1))
    started.board.say(0, Standing.JOINED, 1, 7, 0)
    assert started.look_after() == ["stuck?", False]
    started.board.mark(0, joined_ns=1, stepped_ns=2, first_step=8)
    assert started.look_after() == ["a spare comes", "stuck?", False]


def test_group_that_logs_a_step_has_stepped_until_another_one_is_formed(started: Started) -> None:
    def has_stepped() -> bool:
        return started.crew.has_stepped

    started.crew.form(Generation(number=0, master_port=1))
    assert not has_stepped()
    started.meter.steps_heard += 1
    assert has_stepped()
    started.crew.form(Generation(number=1, master_port=1))
    assert not has_stepped()


def test_rank_that_has_left_its_group_for_good_is_no_survivor(started: Started) -> None:
    """It would be waited for in vain: its program is past `runtime.train`."""
    started.crew.form(Generation(number=0, master_port=1))
    started.board.say(0, Standing.GONE, 0, 7, 0)
    assert started.crew.clear()
    assert started.crew.ranks[0].status is not None


def test_rank_that_has_made_its_last_step_is_told_of_and_can_go_on(started: Started) -> None:
    started.crew.form(Generation(number=0, master_port=1))
    started.board.say(0, Standing.DONE, 0, 7, 0)
    started.board.mark(0, joined_ns=1, stepped_ns=2, first_step=1)
    progress = started.crew.progress()
    assert progress is not None
    assert progress.step == 7
    assert started.crew.clear()
    assert started.crew.ranks[0].status is None


def test_rank_that_was_killed_and_is_not_gone_yet_is_no_survivor(started: Started) -> None:
    """Another node may have told of its own failure in the same moment."""
    started.crew.form(Generation(number=0, master_port=1))
    started.board.say(0, Standing.JOINED, 0, 7, 0)
    assert started.crew.send(signal.SIGKILL)
    assert started.crew.clear(), "it is waited for"
    assert started.crew.ranks[0].status is not None


def test_rank_that_was_killed_for_a_hang_has_a_minute_to_be_gone(started: Started) -> None:
    started.crew.form(Generation(number=0, master_port=1))
    out: Any = started.crew.lookout
    hung = Hang(told="no step", rank=0)

    def endless() -> list[Hang | None]:
        found = []
        for out.hung in (None, Hang(told="elsewhere"), hung):
            found.append(started.crew.endless_hang)
        return found

    out.killed_at = started.clock.monotonic()
    started.clock.advance(HUNG_GONE_S)
    assert endless() == [None, None, None]
    started.clock.advance(0.1)
    assert endless() == [None, None, hung]


class TestStuck:
    """A rank that does not come out of the group before, which the others have left."""

    @pytest.fixture
    def formed(self, started: Started) -> Started:
        started.crew.form(Generation(number=0, master_port=1))
        started.board.say(0, Standing.JOINED, 0, 7, 0)
        started.crew.form(Generation(number=1, master_port=1))
        started.stuck = list(started.crew.ranks)
        return started

    def test_another_takes_its_place_in_the_same_group(self, formed: Started) -> None:
        [old] = formed.crew.ranks
        assert formed.look_after()[-1] == "wait"
        assert formed.signals == [signal.SIGSTOP, signal.SIGKILL, signal.SIGKILL, signal.SIGKILL]
        [new] = formed.crew.ranks
        assert (new is old, old.is_needed, new.is_needed, new.rank) == (False, False, True, 0)
        place = formed.board.place(new.slot)
        assert place is not None
        assert (place.generation, place.rank) == (1, 0)
        assert formed.blamed == []
        formed.clock.advance(SILENT_S + 1)
        recovery = formed.crew.recovery(0.0, 0)
        assert recovery is not None
        assert recovery.kept == 0

    def test_one_that_came_to_the_group_meanwhile_goes_on(self, formed: Started) -> None:
        """Killed now it would be counted among those who have come, and its successor too."""
        [old] = formed.crew.ranks
        formed.board.say(0, Standing.WAITING, 1, 7, 0)
        assert formed.look_after() == ["stuck?"]
        assert (formed.crew.ranks, old.is_needed, old.status) == ([old], True, None)
        assert formed.signals == [signal.SIGSTOP, signal.SIGCONT]

    @pytest.mark.parametrize("standing", [Standing.JOINED, Standing.DONE, Standing.GONE])
    def test_another_takes_the_place_of_one_that_ended_well_before_it_came(
        self, formed: Started, standing: Standing
    ) -> None:
        """The others would wait for it in vain: nothing of it is left to stop, or to kill."""
        [old] = formed.crew.ranks
        formed.board.say(0, standing, 0, 7, 0)
        old.status = 0
        assert "ended before it came to this group" in str(formed.look_after()[1])
        [new] = formed.crew.ranks
        assert (new is old, old.is_needed, new.rank, formed.signals) == (False, False, 0, [])
        assert formed.blamed == []

    def test_one_that_does_not_die_fails_the_group(self, formed: Started) -> None:
        [old] = formed.crew.ranks
        formed.can_be_ended = False
        formed.look_after()
        assert (formed.crew.ranks, formed.blamed) == ([old], [old])


class TestEnd:
    """What is killed, and waited for, when a group is over."""

    @pytest.fixture
    def forked(self, started: Started) -> Iterator[subprocess.Popen[bytes]]:
        """The rank itself: in a session of its own, and it writes to nothing of the supervisor's."""
        started.crew.form(Generation(number=0, master_port=1))
        words = [sys.executable, "-c", "import time; time.sleep(1000)"]
        with subprocess.Popen(words, start_new_session=True) as child:
            started.found.add(child.pid)
            started.board.introduce(0, child.pid, can_answer=False)
            yield child
            KILL(child.pid, signal.SIGKILL)

    def test_forked_rank_is_killed_and_waited_for_when_its_starter_is_gone(
        self, started: Started, forked: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`python train.py | tee log`: the pipeline ends at once, and the rank may still hold its device."""
        assert not started.crew.clear(), "nobody has killed it in truth, and it is not gone"
        assert forked.pid in started.killed

        def kill(pid: int, number: int) -> None:
            if pid == forked.pid:
                KILL(pid, number)
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

        monkeypatch.setattr(os, "kill", kill)
        assert started.crew.clear()

    def test_who_has_no_descriptor_to_look_with_takes_nothing_for_gone(
        self, started: Started, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        started.crew.form(Generation(number=0, master_port=1))
        looks = iter([True])
        monkeypatch.setattr(tree, "can_look", lambda: next(looks, False))
        assert not started.crew.clear(), "they went while it looked"
        assert not started.crew.clear()

    def test_one_of_its_number_that_began_later_is_not_waited_for(
        self, started: Started, forked: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looks = iter([{forked.pid: 1}, {forked.pid: 2}])
        monkeypatch.setattr(tree, "living", lambda _: next(looks))
        assert started.crew.clear()

    def test_number_of_a_rank_that_ended_long_ago_is_somebody_elses(
        self, started: Started, forked: subprocess.Popen[bytes]
    ) -> None:
        [old] = started.crew.ranks
        old.pid, old.status = forked.pid, 0
        assert started.crew.clear()
        assert (started.killed, started.signals) == ([], [])

    def test_what_a_dead_rank_left_in_its_group_is_killed(
        self, started: Started, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        started.crew.form(Generation(number=0, master_port=1))
        [old] = started.crew.ranks
        old.status = 0
        monkeypatch.setattr(tree, "sessions", lambda _: {1_000_777: old.pid, 1_000_778: 5})
        assert started.crew.clear()
        assert (started.killed, started.signals) == ([1_000_777], [signal.SIGKILL] * 2)
