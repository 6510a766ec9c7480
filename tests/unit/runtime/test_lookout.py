"""Who is looked at, when, and who is ended for it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.engines.fake import VirtualClock
from shoal.runtime import lookout, scene
from shoal.runtime.board import Board, Standing
from shoal.runtime.hangs import BUSY_S, LEAVE_S, UNKNOWN_LEAVE_S
from shoal.runtime.lookout import Lookout, Page
from shoal.runtime.stacks import Stacks
from shoal.runtime.watch import Process
from tests.support.shares import an_order

STEP_S = 0.1
LIMIT_S = 1.0


class Node:
    """Two ranks that make steps as they are told to, on a node of several or the only one."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, nodes: int = 1, is_elsewhere: bool = False
    ) -> None:
        self.clock, self.cpu_s = VirtualClock(), 0.0
        self.killed: list[int | None] = []
        self.kept: list[str] = []
        self.looks = 0
        self._is_elsewhere = is_elsewhere
        self.fd, self.board = Board.make()
        self.ranks = [Process(1_000_000 + rank, rank) for rank in range(2)]
        for slot, process in enumerate(self.ranks):
            process.slot = slot
        monkeypatch.setattr(lookout, "kill_group", lambda process: self.killed.append(process.rank))
        monkeypatch.setattr(scene, "look", self._look)
        confinement: Any = SimpleNamespace(work_seconds=lambda: self.cpu_s, processes=set, path="")
        watcher: Any = SimpleNamespace(keep=lambda _, text: self.kept.append(text))
        order = an_order(node="n1", nodes=tuple(f"n{number}" for number in range(1, nodes + 1)))
        page = Page(fd=self.fd, board=self.board)
        self.out = Lookout(order, confinement, watcher, self.clock, page, "/nowhere/work")
        self.out.begin(self.ranks, 0)

    def _look(self, ranks: list[Process], board: Board, *_: object) -> scene.Scene:
        self.looks += 1
        return scene.Scene(
            step=min(board.beat(process.slot).step for process in ranks),
            stacks=tuple((process, Stacks(text=f"look {self.looks}", place="a.py:1")) for process in ranks),
            stopped=frozenset(),
            culprits=(ranks[1],),
            is_elsewhere=self._is_elsewhere,
        )

    def say(self, standing: Standing, generation: int, step: int) -> None:
        for process in self.ranks:
            self.board.say(process.slot, standing, generation, step, 0)
            self.board.mark(process.slot, joined_ns=1, stepped_ns=int(step > 0), first_step=1)

    def train(self, steps: int = 50) -> None:
        for step in range(steps):
            self.say(Standing.JOINED, 0, step)
            self.pass_time(STEP_S, work=1.0)

    def stuck(self) -> list[int | None]:
        return [process.rank for process in self.out.stuck()]

    def pass_time(self, seconds: float, *, work: float = 0.0, has_spare_settled: bool = False) -> None:
        """Somebody uses this share of a processor; then there is a look."""
        self.clock.advance(seconds)
        self.cpu_s += work * seconds
        self.out.look(has_spare_settled=has_spare_settled)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Node(monkeypatch)
    yield made
    os.close(made.fd)


def test_who_holds_up_the_others_is_ended_once_and_all_stacks_are_kept(node: Node) -> None:
    node.train()
    node.pass_time(LIMIT_S / 2)
    assert (node.looks, node.killed, node.out.hung) == (0, [], None)
    node.pass_time(LIMIT_S)
    node.pass_time(LIMIT_S)
    assert (node.killed, node.kept) == ([1], ["look 1", "look 1"])
    assert node.out.hung is not None
    assert (node.out.hung.rank, node.out.hung.place) == (1, "a.py:1")


def test_work_of_a_spare_on_its_way_does_not_hide_a_hang(node: Node) -> None:
    node.train()
    node.out.expect_spare()
    node.pass_time(3 * LIMIT_S, work=0.9)
    assert node.killed == [], "as far as anybody can tell the ranks work"
    node.pass_time(0.0, has_spare_settled=True)
    assert node.killed == [], "they may have worked as well until now"
    node.pass_time(1.5 * LIMIT_S, has_spare_settled=True)
    assert node.killed == [1]


def test_spare_that_waits_already_excuses_no_work_of_the_ranks(node: Node) -> None:
    node.train()
    node.out.expect_spare()
    node.pass_time(0.2, has_spare_settled=True)
    for _ in range(4):
        node.pass_time(LIMIT_S, work=0.9, has_spare_settled=True)
    assert node.killed == []


def test_node_of_several_looks_early_and_keeps_that_when_another_ends_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(monkeypatch, nodes=2, is_elsewhere=True)
    node.train()
    node.pass_time(0.6 * LIMIT_S)
    node.pass_time(0.1 * LIMIT_S)
    assert (node.looks, node.kept) == (1, []), "once, and it may be nothing"
    node.out.end_for_hang()
    assert (node.kept, node.killed) == (["look 1", "look 1"], [])


def test_early_look_at_a_step_that_was_made_after_all_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, nodes=2)
    node.train()
    node.pass_time(0.6 * LIMIT_S)
    node.say(Standing.JOINED, 0, 50)
    node.pass_time(STEP_S)
    node.out.end_for_hang()
    assert (node.looks, node.kept) == (1, [])


def test_only_node_of_a_job_takes_no_early_look(node: Node) -> None:
    node.train()
    node.pass_time(0.6 * LIMIT_S)
    assert node.looks == 0


def test_node_whose_ranks_all_wait_leaves_the_hang_to_another_and_then_ends_the_group_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other may not know the pace yet: its supervisor may be new there."""
    node = Node(monkeypatch, nodes=2, is_elsewhere=True)
    node.train()
    node.pass_time(1.5 * LIMIT_S)
    assert node.kept == []
    node.pass_time(LIMIT_S)
    assert node.out.hung is not None
    assert (node.out.hung.rank, node.killed, node.kept) == (None, [], ["look 2", "look 2"])


def test_only_node_of_a_job_has_nobody_elsewhere_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, nodes=1, is_elsewhere=True)
    node.train()
    node.pass_time(1.5 * LIMIT_S)
    assert node.killed == [1]


def test_ranks_that_we_stopped_do_not_hang_and_have_their_time_when_they_go_on(node: Node) -> None:
    node.train()
    node.out.pause()
    node.pass_time(100 * LIMIT_S)
    node.out.go_on()
    node.pass_time(0.1)
    assert (node.looks, node.killed) == (0, [])
    node.pass_time(2 * LIMIT_S)
    assert node.killed == [1], "from then on they are looked at as before"


def test_pause_lasts_into_the_next_group(node: Node) -> None:
    node.train()
    node.out.pause()
    node.out.begin(node.ranks, 1)
    node.clock.advance(100.0)
    assert node.stuck() == []
    node.out.go_on()
    node.clock.advance(LEAVE_S + 1)
    assert node.stuck() == [0, 1]


def test_rank_inside_the_making_of_a_group_that_is_over_is_given_no_time_for_a_step(node: Node) -> None:
    node.say(Standing.WAITING, 1, 3)
    node.out.begin(node.ranks, 2)
    node.clock.advance(LEAVE_S - 1)
    assert node.stuck() == []
    node.clock.advance(2.0)
    assert (node.stuck(), node.kept) == ([0, 1], ["look 1", "look 1"])
    assert (node.stuck(), node.looks) == ([], 1), "each is told of once"


def test_rank_that_may_be_in_its_first_steps_is_given_a_minute_to_come_out(node: Node) -> None:
    node.say(Standing.JOINED, 1, 3)
    node.out.begin(node.ranks, 2)
    node.clock.advance(LEAVE_S + 1)
    assert node.stuck() == []
    node.clock.advance(UNKNOWN_LEAVE_S)
    assert node.stuck() == [0, 1]


def test_idle_rank_of_a_group_that_another_node_saw_hang_is_at_no_step(node: Node) -> None:
    node.say(Standing.JOINED, 1, 3)
    node.out.end_for_hang()
    node.out.begin(node.ranks, 2)
    node.clock.advance(LEAVE_S + 1)
    assert node.stuck() == [0, 1]
    node.out.begin(node.ranks, 3)
    node.clock.advance(LEAVE_S + 1)
    assert node.stuck() == [], "the group after that did not hang"


def test_rank_that_works_while_another_node_saw_a_hang_has_time_for_its_step(node: Node) -> None:
    """One evaluates, the others wait for it, and call that a hang sooner than its own node does."""
    node.train()
    node.out.end_for_hang()
    node.out.begin(node.ranks, 1)
    node.clock.advance(LEAVE_S + 1)
    node.cpu_s += LEAVE_S / 2
    assert node.stuck() == []
    node.clock.advance(10 * LEAVE_S)
    assert node.stuck() == [0, 1], "it has done nothing since"
    node.out.begin(node.ranks, 2)
    node.say(Standing.JOINED, 2, 50)
    node.out.end_for_hang()
    node.out.begin(node.ranks, 3)
    node.clock.advance(BUSY_S - 1)
    node.cpu_s += BUSY_S
    assert node.stuck() == []
    node.clock.advance(2.0)
    assert node.stuck() == [0, 1], "as long as its own node waits for whoever works"


def test_rank_of_a_group_that_hung_by_our_own_pace_is_at_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, nodes=2, is_elsewhere=True)
    for step in range(50):
        node.say(Standing.JOINED, 0, step)
        node.pass_time(2.0, work=1.0)
    node.pass_time(100.0)
    assert node.out.hung is not None
    node.out.begin(node.ranks, 1)
    node.clock.advance(LEAVE_S + 1)
    node.cpu_s += LEAVE_S  # it waits for a device in a loop
    assert node.stuck() == [0, 1]


def test_group_that_waits_for_its_model_does_not_hang_by_the_length_of_its_steps(node: Node) -> None:
    node.train()
    node.out.begin(node.ranks, 1)
    for process in node.ranks:
        node.board.say(process.slot, Standing.JOINED, 1, 49, 0)
        node.board.mark(process.slot, joined_ns=5, stepped_ns=0, first_step=0)
    node.pass_time(0.1)
    node.pass_time(BUSY_S - 1)
    assert node.killed == []
    node.say(Standing.JOINED, 1, 50)
    node.pass_time(0.1)
    node.pass_time(1.5 * LIMIT_S)
    assert node.killed == [1], "nor is that time the length of a step"


def test_who_takes_the_place_of_one_that_was_stuck_has_time_to_come(node: Node) -> None:
    node.board.say(0, Standing.WAITING, 2, 3, 0)
    node.board.say(1, Standing.WAITING, 1, 3, 0)
    node.out.begin(node.ranks, 2)
    node.clock.advance(LEAVE_S + 1)
    assert node.stuck() == [1]
    node.ranks[1] = Process(1_000_009, 1)
    node.ranks[1].slot = 1
    node.out.wait_again()
    assert node.stuck() == []
    node.clock.advance(LEAVE_S + 1)
    assert node.stuck() == [1]


def test_who_was_killed_for_a_hang_is_known_to_be_and_since_when(node: Node) -> None:
    node.train()
    node.pass_time(2 * LIMIT_S)
    assert [process.is_doomed for process in node.ranks] == [False, True]
    assert node.out.killed_at == node.clock.monotonic()
