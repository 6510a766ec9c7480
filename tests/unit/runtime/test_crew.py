"""How the ranks of a node are looked after: when a spare is started, and who hears of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.engines.fake import VirtualClock
from shoal.runtime import crew
from shoal.runtime.board import VARIABLE, Board, Standing
from shoal.runtime.crew import SILENT_S, Crew
from shoal.runtime.environment import Generation
from shoal.runtime.watch import Process
from tests.support.shares import an_order


class Started:
    """A crew of one rank whose processes are only written down, and what its lookout is told."""

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.heard: list[object] = []
        self.stuck: list[Process] = []
        self.can_be_ended = True
        self.signals: list[int] = []
        self.blamed: list[Process] = []
        confinement: Any = SimpleNamespace(has_memory_for=lambda _: True, processes=set)
        launcher: Any = SimpleNamespace(start_script=self._start, work="/nowhere/work")
        watcher: Any = SimpleNamespace(
            add=lambda *_: None,
            say=self.heard.append,
            pipes_of=lambda _: set(),
            turn=self._end_stuck,
            is_silent=lambda _: True,
            blame=self.blamed.append,
            forget=lambda _: None,
        )
        self.meter = SimpleNamespace(variable="", fd=-1, steps_heard=0)
        meter: Any = self.meter
        order = an_order(max_restarts=3, ranks_per_node=1)
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
        self.slots.append(int(environment[VARIABLE].partition(":")[2]))
        return 1_000_000 + len(self.slots), ()

    def _stuck(self) -> list[Process]:
        self.heard.append("stuck?")
        found, self.stuck = self.stuck, []
        return found

    def _end_stuck(self, timeout_s: float) -> None:
        self.clock.advance(timeout_s)
        if self.can_be_ended:
            self.crew.ranks[0].status = signal.SIGKILL

    def look_after(self) -> list[object]:
        self.heard.clear()
        self.crew.look_after()
        return list(self.heard)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    made = Started()
    monkeypatch.setattr(os, "kill", lambda _, number: made.signals.append(number))
    monkeypatch.setattr(crew, "kill_group", lambda _: made.signals.append(signal.SIGKILL))
    yield made
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
        assert formed.signals == [signal.SIGSTOP, signal.SIGKILL, signal.SIGKILL]
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

    def test_one_that_does_not_die_fails_the_group(self, formed: Started) -> None:
        [old] = formed.crew.ranks
        formed.can_be_ended = False
        formed.look_after()
        assert (formed.crew.ranks, formed.blamed) == ([old], [old])
