"""A node whose ranks make steps as a test tells them to, under a real lookout: nothing is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.engines.fake import VirtualClock
from shoal.runtime import lookout, scene, tree
from shoal.runtime.board import Board, Standing
from shoal.runtime.hangs import LEAST_S, Doing
from shoal.runtime.lookout import Lookout, Page
from shoal.runtime.stacks import Stacks
from shoal.runtime.watch import Process
from tests.support.shares import an_order

STEP_S, LOOK_S = 0.1, 0.25
STOPPED_S, IDLE_S, BUSY_S = (LEAST_S[doing] for doing in (Doing.STOPPED, Doing.NOTHING, Doing.WORK))
ELSEWHERE_S = LEAST_S[Doing.WAITING]


class Node:
    """Two ranks that make steps as they are told to, on a node of several or the only one."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, nodes: int = 1, is_elsewhere: bool = False
    ) -> None:
        self.clock, self.cpu_s = VirtualClock(), 0.0
        self.can_read_cpu = True
        self.killed: list[int | None] = []
        self.kept: list[str] = []
        self.looks = 0
        self.halted: frozenset[int] = frozenset()
        self.is_inside = self.is_saving = False
        self.is_elsewhere = is_elsewhere
        self.fd, self.board = Board.make()
        self.ranks = [Process(1_000_000 + rank, rank) for rank in range(2)]
        for slot, process in enumerate(self.ranks):
            process.slot = slot
        monkeypatch.setattr(lookout, "kill_group", lambda process: self.killed.append(process.rank))
        monkeypatch.setattr(scene, "look", self._look)
        monkeypatch.setattr(scene, "halted", lambda *_, **__: self.halted)
        monkeypatch.setattr(tree, "are_inside", lambda _: self.is_inside)
        confinement: Any = SimpleNamespace(
            work_seconds=lambda: self.cpu_s if self.can_read_cpu else None,
            processes=set,
            path="",
            sandbox=None,
        )
        watcher: Any = SimpleNamespace(keep=lambda _, text: self.kept.append(text))
        order = an_order(node="n1", nodes=tuple(f"n{number}" for number in range(1, nodes + 1)))
        page = Page(fd=self.fd, board=self.board)
        self.out = Lookout(order, confinement, watcher, self.clock, page, "/nowhere/work")
        self.out.begin(self.ranks, 0)

    def _look(self, ranks: list[Process], board: Board, *_: object, is_inside: bool) -> scene.Scene:
        self.looks += 1
        self.while_looking()
        return scene.Scene(
            step=min(board.beat(process.slot).step for process in ranks),
            stacks=tuple((process, Stacks(text=f"look {self.looks}", place="a.py:1")) for process in ranks),
            stopped=frozenset(),
            culprits=(ranks[1],),
            is_elsewhere=self.is_elsewhere and not self.halted,
            is_saving=self.is_saving,
        )

    def while_looking(self) -> None:
        """What happens in the two seconds that it takes."""

    def say(self, standing: Standing, generation: int, step: int) -> None:
        for process in self.ranks:
            self.board.say(process.slot, standing, generation, step, 0)
            self.board.mark(process.slot, joined_ns=1, stepped_ns=int(step > 0), first_step=1)

    def train(self, steps: int = 50, step_s: float = STEP_S) -> None:
        first = self.board.beat(0).step + 1
        for step in range(first, first + steps):
            self.say(Standing.JOINED, 0, step)
            self.pass_time(step_s, work=1.0)

    def pass_time(self, seconds: float, *, work: float = 0.0, has_spare_settled: bool = False) -> None:
        """Somebody uses this share of a processor; there are looks all the time, and one at the end."""
        for step_s in self._moments(seconds):
            self.sleep(step_s, work=work)
            self.out.look(has_spare_settled=has_spare_settled)

    def stuck(self, seconds: float = 0.0, *, work: float = 0.0) -> list[int | None]:
        """Who is found to be so in that time."""
        found: list[int | None] = []
        for step_s in self._moments(seconds):
            self.sleep(step_s, work=work)
            found += [process.rank for process in self.out.stuck()]
        return found

    def sleep(self, seconds: float, *, work: float = 0.0) -> None:
        """Nobody looks."""
        self.clock.advance(seconds)
        self.cpu_s += work * seconds

    @staticmethod
    def _moments(seconds: float) -> list[float]:
        return [LOOK_S] * int(seconds / LOOK_S) + [seconds % LOOK_S]
