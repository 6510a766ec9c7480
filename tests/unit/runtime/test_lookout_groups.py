"""Who does not come out of a group that is over, or into the one that follows, and who has time for it."""

from __future__ import annotations

import pytest

from shoal.runtime.board import Standing
from shoal.runtime.hangs import LEAVE_S, UNKNOWN_LEAST_S, Doing
from shoal.runtime.watch import Process
from tests.support.watched_node import BUSY_S, ELSEWHERE_S, IDLE_S, Node


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
