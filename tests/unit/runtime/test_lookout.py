"""Who is looked at, when, and who is ended for it."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest

from shoal.runtime import lookout, scene
from shoal.runtime.board import Standing
from shoal.runtime.hangs import LEAVE_S
from tests.support.watched_node import BUSY_S, ELSEWHERE_S, IDLE_S, LOOK_S, STOPPED_S, Node


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


def test_ranks_that_we_stopped_do_not_hang_and_have_their_time_when_they_go_on(node: Node) -> None:
    node.train()
    node.out.pause()
    node.pass_time(10 * IDLE_S)
    node.out.go_on()
    node.pass_time(0.1)
    assert (node.looks, node.killed) == (0, [])
    node.pass_time(2 * IDLE_S)
    assert node.killed == [1], "from then on they are looked at as before"


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
