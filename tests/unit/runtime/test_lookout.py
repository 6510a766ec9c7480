"""Who is looked at, when, and who is ended for it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from shoal.engines.fake import VirtualClock
from shoal.runtime import lookout, scene, tree
from shoal.runtime.board import Board, Standing
from shoal.runtime.hangs import LEAST_S, LEAVE_S, UNKNOWN_LEAST_S, Doing
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


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Node(monkeypatch)
    yield made
    os.close(made.fd)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One of two nodes; its ranks wait for one of the other."""
    made = Node(monkeypatch, nodes=2, is_elsewhere=True)
    yield made
    os.close(made.fd)


def test_who_holds_up_the_others_is_ended_once_and_all_stacks_are_kept(node: Node) -> None:
    node.train()
    node.pass_time(IDLE_S - 1)
    assert (node.looks, node.killed, node.out.hung) == (0, [], None)
    node.pass_time(2.0)
    node.pass_time(IDLE_S)
    assert (node.killed, node.kept) == ([1], ["look 1", "look 1"])
    assert node.out.hung is not None
    assert (node.out.hung.rank, node.out.hung.place) == (1, "a.py:1")


class TestStopped:
    """A rank that somebody stopped with a signal."""

    def test_it_is_found_within_seconds_whoever_works(self, node: Node) -> None:
        node.train()
        node.halted = frozenset({1})
        node.pass_time(STOPPED_S - 0.2, work=1.0)
        assert node.looks == 0
        node.pass_time(3 * LOOK_S, work=1.0)
        assert node.killed == [1]

    @pytest.mark.parametrize("standing", [Standing.DONE, Standing.GONE])
    def test_it_is_found_between_two_epochs_and_not_after_training(
        self, node: Node, standing: Standing
    ) -> None:
        node.train()
        node.board.say(0, standing, 0, 50, 0)
        node.pass_time(BUSY_S)
        node.halted = frozenset({1})
        node.pass_time(3 * lookout.GLANCE_S)
        assert node.killed == ([1] if standing is Standing.DONE else [])

    def test_who_was_stopped_for_a_moment_is_left_alone(self, node: Node) -> None:
        node.train()
        node.pass_time(1.5 * STOPPED_S)
        for _ in range(3):
            node.halted = frozenset({1})
            node.sleep(lookout.GLANCE_S)
            node.pass_time(0.0)
            node.halted = frozenset()
            node.pass_time(LOOK_S)
        assert node.looks == 0

    def test_who_was_continued_while_we_looked_is_left_alone(
        self, node: Node, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        node.train()
        node.halted = frozenset({1})
        monkeypatch.setattr(node, "while_looking", lambda: setattr(node, "halted", frozenset()))
        node.pass_time(3 * STOPPED_S)
        assert (node.looks, node.killed) == (1, [])

    def test_it_is_told_from_who_does_nothing_where_steps_are_long(self, node: Node) -> None:
        """Both are waited for as long there, and of the one nothing is learned from a drill of the other."""
        for count, halted in ((1, frozenset({1})), (2, frozenset[int]())):
            node.train(step_s=3.0)
            node.train(1, step_s=0.0)
            node.out.forewarn()
            node.halted = halted
            node.pass_time(8 * 3.0 - 1)
            assert len(node.killed) == count - 1
            node.pass_time(2.0)
            assert len(node.killed) == count
            node.halted = frozenset()
            node.out.begin(node.ranks, 0)

    @pytest.mark.parametrize("is_drill", [True, False])
    def test_it_is_found_later_the_next_time_unless_it_was_a_drill(self, node: Node, is_drill: bool) -> None:
        node.train()
        if is_drill:
            node.out.forewarn()
        node.halted = frozenset({1})
        node.pass_time(2 * STOPPED_S)
        assert node.killed == [1]
        node.halted = frozenset()
        node.out.begin(node.ranks, 0)
        node.train()
        node.halted = frozenset({1})
        node.pass_time(2 * STOPPED_S)
        assert node.killed == ([1, 1] if is_drill else [1])
        node.pass_time(3 * STOPPED_S)
        assert node.killed == [1, 1]


class TestHealthy:
    """Ranks that make no step for good reasons."""

    def test_evaluation_of_many_minutes_is_let_be(self, node: Node) -> None:
        node.train()
        node.pass_time(BUSY_S - 10, work=1.0)
        assert node.looks == 0

    def test_seconds_without_work_are_let_be(self, node: Node) -> None:
        node.train()
        for _ in range(3):
            node.pass_time(IDLE_S - 2)
            node.train(1)
        assert node.looks == 0

    @pytest.mark.parametrize("step_s", [0.1, 2.4, 3.0, 10.0, 30.0])
    def test_who_waits_for_a_disk_is_at_work(self, node: Node, step_s: float) -> None:
        node.train(step_s=step_s)
        node.train(1, step_s=0.0)
        node.is_inside = True
        node.pass_time(min(10 * max(IDLE_S, 8 * step_s), BUSY_S - 2 * step_s))
        assert node.looks == 0

    def test_who_waits_for_a_disk_after_one_was_stopped_for_long_is_at_work(self, node: Node) -> None:
        for _ in range(6):
            node.train()
            node.halted = frozenset({1})
            node.pass_time(3 * IDLE_S, work=1.0)
            node.halted = frozenset()
            node.out.begin(node.ranks, 0)
        assert len(node.killed) > 4
        looks = node.looks
        node.train()
        node.is_inside = True
        node.pass_time(10 * IDLE_S)
        assert node.looks == looks

    def test_what_was_called_a_hang_and_comes_again_is_not(self, node: Node) -> None:
        node.train()
        node.pass_time(IDLE_S + 1)
        assert node.killed == [1]
        node.out.begin(node.ranks, 0)
        node.train()
        node.pass_time(2 * IDLE_S - 1)
        assert node.killed == [1]

    def test_machine_that_slept_ends_nobody(self, node: Node) -> None:
        node.train()
        node.pass_time(1.0)
        node.sleep(3600.0)
        node.pass_time(IDLE_S - 1)
        assert node.looks == 0
        node.say(Standing.JOINED, 0, 50)
        node.pass_time(0.0)
        node.sleep(3600.0)
        node.pass_time(0.0)
        node.train()
        node.pass_time(IDLE_S + 1)
        assert node.killed == [1], "nor is the sleep the length of a step"

    def test_machine_that_slept_while_a_group_formed_ends_nobody(self, node: Node) -> None:
        node.say(Standing.WAITING, 1, 3)
        node.out.begin(node.ranks, 2)
        assert node.stuck(LEAVE_S - 1) == []
        node.sleep(3600.0)
        assert node.stuck(LEAVE_S - 1) == []
        assert node.stuck(2.0) == [0, 1]

    def test_who_made_a_step_while_we_looked_is_let_be(
        self, node: Node, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        node.train()
        monkeypatch.setattr(node, "while_looking", lambda: node.say(Standing.JOINED, 0, 60))
        node.pass_time(IDLE_S + 1)
        assert (node.looks, node.killed, node.out.hung) == (1, [], None)

    @pytest.mark.parametrize("standing", [Standing.DONE, Standing.GONE])
    def test_after_the_last_step_of_any_nobody_is_late(self, node: Node, standing: Standing) -> None:
        """The last save, or what a program does with its model after training, takes as long as it takes."""
        node.train()
        node.board.say(0, standing, 0, 50, 1)
        node.pass_time(2 * BUSY_S)
        assert node.looks == 0
        node.board.say(0, Standing.JOINED, 0, 50, 2)
        node.pass_time(IDLE_S - 1)
        assert node.looks == 0, "it goes on to more steps"
        node.pass_time(2.0)
        assert node.killed == [1]

    def test_validation_between_two_epochs_is_neither_a_silence_nor_a_step(self, node: Node) -> None:
        for _ in range(3):
            node.train()
            node.say(Standing.DONE, 0, node.board.beat(0).step)
            node.pass_time(2 * BUSY_S)
        node.train(10)
        assert node.looks == 0
        node.train(1, step_s=0.0)
        node.pass_time(IDLE_S + 1)
        assert node.killed == [1]

    def test_epoch_that_passed_between_two_looks_lends_its_validation_to_no_step(self, node: Node) -> None:
        node.train()
        for step in (50, 60):
            node.say(Standing.DONE, 0, step)
            node.pass_time(BUSY_S)
        node.train(1, step_s=0.0)
        node.pass_time(IDLE_S + 1)
        assert node.killed == [1]

    def test_after_one_has_ended_well_nobody_is_late(self, node: Node) -> None:
        node.train()
        node.ranks[0].status = 0
        node.pass_time(2 * BUSY_S)
        assert node.looks == 0

    def test_where_work_cannot_be_read_nobody_is_called_idle(self, node: Node) -> None:
        node.train()
        node.can_read_cpu = False
        node.pass_time(10 * IDLE_S)
        assert (node.looks, node.stuck(10 * IDLE_S)) == (0, [])
        node.can_read_cpu = True
        node.pass_time(IDLE_S - 1)
        assert node.looks == 0
        node.pass_time(2.0)
        assert node.killed == [1]

    def test_only_node_waits_for_a_checkpoint_under_way(self, monkeypatch: pytest.MonkeyPatch) -> None:
        node = Node(monkeypatch, is_elsewhere=True)
        node.is_saving = True
        node.train()
        node.pass_time(ELSEWHERE_S - 1)
        assert node.killed == []
        node.pass_time(2.0)
        assert node.killed == [1]


def test_work_of_a_spare_on_its_way_does_not_hide_a_hang(node: Node) -> None:
    node.train()
    node.out.expect_spare()
    node.pass_time(3 * IDLE_S, work=0.9)
    assert node.killed == [], "as far as anybody can tell the ranks work"
    node.pass_time(0.0, has_spare_settled=True)
    assert node.killed == [], "they may have worked as well until now"
    node.pass_time(1.5 * IDLE_S, has_spare_settled=True)
    assert node.killed == [1]


def test_spare_that_waits_already_excuses_no_work_of_the_ranks(node: Node) -> None:
    node.train()
    node.out.expect_spare()
    node.pass_time(0.2, has_spare_settled=True)
    node.pass_time(4 * IDLE_S, work=0.9, has_spare_settled=True)
    assert node.killed == []


def test_node_of_several_looks_early_and_keeps_that_when_another_ends_the_group(waiting: Node) -> None:
    """The other may have seen that somebody stopped its rank, which takes it a second."""
    waiting.train()
    waiting.pass_time(0.6 * STOPPED_S)
    waiting.pass_time(STOPPED_S)
    assert (waiting.looks, waiting.kept) == (1, []), "once, and it may be nothing"
    waiting.out.end_for_hang()
    assert (waiting.kept, waiting.killed) == (["look 1", "look 1"], [])


def test_early_look_at_a_step_that_was_made_after_all_is_not_kept(waiting: Node) -> None:
    waiting.train()
    waiting.pass_time(0.6 * STOPPED_S)
    waiting.train(1)
    waiting.out.end_for_hang()
    assert (waiting.looks, waiting.kept) == (1, [])


def test_who_works_is_not_looked_at_early(waiting: Node) -> None:
    waiting.train()
    waiting.pass_time(10 * IDLE_S, work=1.0)
    assert waiting.looks == 0


def test_only_node_of_a_job_takes_no_early_look(node: Node) -> None:
    node.train()
    node.pass_time(0.6 * IDLE_S)
    assert node.looks == 0


def test_node_whose_ranks_all_wait_leaves_the_hang_to_another_and_then_ends_the_group_alone(
    waiting: Node,
) -> None:
    """The one that they wait for may evaluate. If it hangs, its own node sees that much sooner."""
    waiting.train()
    waiting.pass_time(ELSEWHERE_S - 1)
    assert (waiting.kept, waiting.out.hung) == ([], None)
    waiting.pass_time(2.0)
    assert waiting.out.hung is not None
    assert (waiting.out.hung.rank, waiting.killed, len(waiting.kept)) == (None, [], 2)


def test_program_that_waits_longer_for_others_is_waited_for_as_long(waiting: Node) -> None:
    waiting.train()
    waiting.board.wait_for(1, 2 * ELSEWHERE_S)
    waiting.pass_time(2 * ELSEWHERE_S - 1)
    assert waiting.out.hung is None
    waiting.pass_time(2.0)
    assert waiting.out.hung is not None


def test_rank_that_waited_and_then_hangs_itself_is_found(waiting: Node) -> None:
    waiting.train()
    waiting.pass_time(1.5 * IDLE_S)
    assert (waiting.killed, waiting.out.hung) == ([], None)
    waiting.is_elsewhere = False
    waiting.pass_time(IDLE_S)
    assert waiting.killed == [1]


def test_rank_that_is_stopped_while_others_are_waited_for_is_found(waiting: Node) -> None:
    waiting.train()
    waiting.pass_time(1.5 * IDLE_S)
    waiting.halted = frozenset({1})
    waiting.pass_time(2 * lookout.GLANCE_S)
    assert waiting.killed == [1]


def test_only_node_of_a_job_has_nobody_elsewhere_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, nodes=1, is_elsewhere=True)
    node.train()
    node.pass_time(IDLE_S + 1)
    assert node.killed == [1]


def test_ranks_that_we_stopped_do_not_hang_and_have_their_time_when_they_go_on(node: Node) -> None:
    node.train()
    node.out.pause()
    node.pass_time(10 * IDLE_S)
    node.out.go_on()
    node.pass_time(0.1)
    assert (node.looks, node.killed) == (0, [])
    node.pass_time(2 * IDLE_S)
    assert node.killed == [1], "from then on they are looked at as before"


def test_pause_lasts_into_the_next_group(node: Node) -> None:
    node.train()
    node.out.pause()
    node.out.begin(node.ranks, 1)
    assert node.stuck(10 * IDLE_S) == []
    node.out.go_on()
    assert node.stuck(IDLE_S + 1) == [0, 1]


def test_rank_inside_the_making_of_a_group_that_is_over_is_given_no_time_for_a_step(node: Node) -> None:
    node.say(Standing.WAITING, 1, 3)
    node.out.begin(node.ranks, 2)
    assert node.stuck(LEAVE_S - 1) == []
    assert node.stuck(2.0) == [0, 1], "each is told of once"
    assert (node.kept, node.looks) == (["look 1", "look 1"], 1)


def test_rank_that_may_be_in_its_first_steps_is_given_a_minute_to_come_out(node: Node) -> None:
    node.say(Standing.JOINED, 1, 3)
    node.out.begin(node.ranks, 2)
    assert node.stuck(UNKNOWN_LEAST_S[Doing.NOTHING] - 1) == []
    assert node.stuck(2.0) == [0, 1]


def test_rank_that_is_stopped_is_given_no_time_for_a_step(node: Node) -> None:
    node.train()
    node.halted = frozenset({1})
    node.out.begin(node.ranks, 2)
    assert node.stuck(LEAVE_S + 1) == [1]


def test_rank_that_works_after_an_ordinary_loss_has_time_for_its_step(node: Node) -> None:
    """It evaluates, and hears of the loss of a peer when it comes to the next collective."""
    node.train()
    node.out.begin(node.ranks, 1)
    assert node.stuck(BUSY_S - 1, work=1.0) == []
    assert node.stuck(2.0, work=1.0) == [0, 1]


def test_rank_that_waits_for_a_disk_after_an_ordinary_loss_has_time_for_its_step(node: Node) -> None:
    node.train()
    node.is_inside = True
    node.out.begin(node.ranks, 1)
    assert node.stuck(10 * IDLE_S) == []


def test_rank_that_makes_its_last_save_when_a_peer_is_lost_may_end_it(node: Node) -> None:
    node.train()
    node.board.say(0, Standing.DONE, 0, 50, 0)
    node.board.say(1, Standing.WAITING, 1, 50, 0)
    node.out.begin(node.ranks, 1)
    assert node.stuck(BUSY_S - 1) == []
    assert node.stuck(2.0) == [0], "a peer that it validates with may be the one that was lost"


def test_rank_that_is_done_excuses_no_other(node: Node) -> None:
    node.train()
    node.board.say(0, Standing.DONE, 0, 50, 0)
    node.out.begin(node.ranks, 1)
    assert node.stuck(IDLE_S - 1) == []
    assert node.stuck(2.0) == [1]


def test_rank_that_was_stopped_after_its_last_step_is_given_no_time_to_end_it(node: Node) -> None:
    node.train()
    node.say(Standing.DONE, 0, 50)
    node.halted = frozenset({1})
    node.out.begin(node.ranks, 1)
    assert node.stuck(LEAVE_S + 1) == [1]


def test_rank_that_left_for_good_before_it_heard_of_another_group_is_replaced(node: Node) -> None:
    node.train()
    node.board.say(0, Standing.GONE, 0, 50, 0)
    node.board.say(1, Standing.WAITING, 1, 50, 0)
    node.out.begin(node.ranks, 1)
    assert node.stuck(LEAVE_S + 1, work=1.0) == [0]


@pytest.mark.parametrize("standing", [Standing.JOINED, Standing.DONE, Standing.GONE])
def test_rank_that_ended_well_before_it_heard_of_another_group_is_replaced(
    node: Node, standing: Standing
) -> None:
    node.train()
    node.board.say(0, standing, 0, 50, 0)
    node.board.say(1, Standing.WAITING, 1, 50, 0)
    node.out.begin(node.ranks, 1)
    node.ranks[0].status = 0
    assert node.stuck(LEAVE_S + 1, work=1.0) == [0]


def test_rank_that_ended_well_before_it_came_is_not_the_end_of_the_group(node: Node) -> None:
    node.train()
    node.out.begin(node.ranks, 1)
    node.ranks[0].status = 0
    node.board.say(1, Standing.JOINED, 1, 51, 0)
    node.pass_time(1.0)
    node.pass_time(IDLE_S + 1)
    assert node.killed == [1]


def test_idle_rank_of_a_group_that_another_node_saw_hang_has_waited_for_long(node: Node) -> None:
    node.say(Standing.JOINED, 1, 3)
    node.out.end_for_hang()
    node.out.begin(node.ranks, 2)
    assert node.stuck(IDLE_S - 1) == []
    assert node.stuck(2.0) == [0, 1]
    node.out.begin(node.ranks, 3)
    assert node.stuck(IDLE_S + 1) == [], "the group after that did not hang"


def test_rank_that_works_while_another_node_saw_a_hang_has_time_for_its_step(node: Node) -> None:
    """One evaluates, the others wait for it, and may call that a hang sooner than its own node does."""
    node.train()
    node.out.end_for_hang()
    node.out.begin(node.ranks, 1)
    assert node.stuck(BUSY_S - 1, work=1.0) == []
    assert node.stuck(2.0, work=1.0) == [0, 1], "as long as its own node waits for whoever works"


def test_rank_that_was_killed_in_its_step_has_longer_for_it_the_next_time(node: Node) -> None:
    node.train()
    node.out.begin(node.ranks, 1)
    assert node.stuck(IDLE_S + 1) == [0, 1]
    node.out.begin(node.ranks, 2)
    assert node.stuck(2 * IDLE_S - 1) == []


def test_rank_of_a_group_that_hung_by_our_own_pace_is_at_no_step(waiting: Node) -> None:
    waiting.train()
    waiting.pass_time(ELSEWHERE_S + 1)
    assert waiting.out.hung is not None
    waiting.out.begin(waiting.ranks, 1)
    assert waiting.stuck(LEAVE_S + 1, work=1.0) == [0, 1], "it waits for a device in a loop"


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
    node.pass_time(IDLE_S + 1)
    assert node.killed == [1], "nor is that time the length of a step"


def test_who_takes_the_place_of_one_that_was_stuck_has_time_to_come(node: Node) -> None:
    node.board.say(0, Standing.WAITING, 2, 3, 0)
    node.board.say(1, Standing.WAITING, 1, 3, 0)
    node.out.begin(node.ranks, 2)
    assert node.stuck(LEAVE_S + 1) == [1]
    node.ranks[1] = Process(1_000_009, 1)
    node.ranks[1].slot = 1
    node.out.wait_again()
    assert node.stuck(LEAVE_S - 1) == []
    assert node.stuck(2.0) == [1]


def test_process_that_may_not_be_killed_keeps_nobody_from_the_others(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(pid: int, number: int) -> None:
        raise PermissionError(pid, number)

    look = node._look

    def with_a_stopped_one(*words: Any, **more: Any) -> scene.Scene:
        return msgspec.structs.replace(look(*words, **more), stopped=frozenset({1_000_005}))

    monkeypatch.setattr(scene, "look", with_a_stopped_one)
    monkeypatch.setattr(os, "kill", kill)
    node.train()
    node.pass_time(IDLE_S + 1)
    assert node.killed == [1]
    assert node.out.hung is not None


def test_who_was_killed_for_a_hang_is_known_to_be_and_since_when(node: Node) -> None:
    node.train()
    began_at = node.clock.monotonic()
    node.pass_time(IDLE_S + 1)
    assert [process.is_doomed for process in node.ranks] == [False, True]
    assert began_at + IDLE_S < node.out.killed_at <= node.clock.monotonic()
