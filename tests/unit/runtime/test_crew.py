"""How the ranks of a node are looked after: when a spare is started, and who hears of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.engines.fake import VirtualClock
from shoal.runtime.board import VARIABLE, Board, Standing
from shoal.runtime.crew import Crew
from shoal.runtime.environment import Generation
from tests.support.shares import an_order


class Started:
    """A crew of one rank whose processes are only written down, and what its lookout is told."""

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.heard: list[object] = []
        confinement: Any = SimpleNamespace(has_memory_for=lambda _: True)
        launcher: Any = SimpleNamespace(start_script=self._start, work="/nowhere/work")
        watcher: Any = SimpleNamespace(add=lambda *_: None)
        self.meter = SimpleNamespace(variable="", fd=-1, steps_heard=0)
        meter: Any = self.meter
        order = an_order(max_restarts=3, ranks_per_node=1)
        clock = VirtualClock()
        self.crew = Crew(order, confinement, launcher, watcher, clock, lambda *_: {}, meter)
        self.fd = self.crew.kept_fds[0]
        self.board = Board(self.fd)
        out: Any = SimpleNamespace(
            begin=lambda *_: None,
            expect_spare=lambda: self.heard.append("a spare comes"),
            look_for_stuck=lambda: self.heard.append("stuck?"),
            look=lambda *, has_spare_settled: self.heard.append(has_spare_settled),
        )
        self.crew.lookout = out

    def _start(self, run: str, environment: dict[str, str], *, keep: object) -> tuple[int, tuple[()]]:
        self.slots.append(int(environment[VARIABLE].partition(":")[2]))
        return 1_000_000 + len(self.slots), ()

    def look_after(self) -> list[object]:
        self.heard.clear()
        self.crew.look_after()
        return list(self.heard)


@pytest.fixture
def started() -> Iterator[Started]:
    made = Started()
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
