"""Which ranks do not leave an ended group, or do not join the next, and how much time each of them has."""

from __future__ import annotations

import pytest

from shoal.runtime.process.watcher import Process
from shoal.runtime.rank.board import RankStatus
from shoal.runtime.supervisor.step_pace import LEAVE_S, MIN_SILENCE_AT_FIRST_S, RankActivity
from tests.support.runtime.rank_boards import BUSY_S, IDLE_S, WAITING_S, WatchedNode


def test_pause_lasts_into_the_next_group(node: WatchedNode) -> None:
    node.train()
    node.detector.pause()
    node.detector.begin(node.ranks, 1)
    assert node.find_stuck(10 * IDLE_S) == []
    node.detector.resume()
    assert node.find_stuck(IDLE_S + 1) == [0, 1]


def test_rank_that_still_forms_an_ended_group_gets_no_time_for_a_step(
    node: WatchedNode,
) -> None:
    node.write_statuses(RankStatus.WAITING, 1, 3)
    node.detector.begin(node.ranks, 2)
    assert node.find_stuck(LEAVE_S - 1) == []
    assert node.find_stuck(2.0) == [0, 1], "each is returned once"
    assert (node.logged_stacks, node.num_snapshots) == (["look 1", "look 1"], 1)


def test_rank_that_may_be_in_its_first_steps_gets_a_minute_to_leave(node: WatchedNode) -> None:
    node.write_statuses(RankStatus.JOINED, 1, 3)
    node.detector.begin(node.ranks, 2)
    assert node.find_stuck(MIN_SILENCE_AT_FIRST_S[RankActivity.NOTHING] - 1) == []
    assert node.find_stuck(2.0) == [0, 1]


def test_stopped_rank_gets_no_time_for_a_step(node: WatchedNode) -> None:
    node.train()
    node.stopped_slots = frozenset({1})
    node.detector.begin(node.ranks, 2)
    assert node.find_stuck(LEAVE_S + 1) == [1]


def test_working_rank_has_time_for_its_step_after_a_loss(node: WatchedNode) -> None:
    """It evaluates, and notices the loss of a peer only at the next collective."""
    node.train()
    node.detector.begin(node.ranks, 1)
    assert node.find_stuck(BUSY_S - 1, work=1.0) == []
    assert node.find_stuck(2.0, work=1.0) == [0, 1]


def test_rank_that_waits_for_a_disk_has_time_for_its_step_after_a_loss(node: WatchedNode) -> None:
    node.train()
    node.is_in_kernel = True
    node.detector.begin(node.ranks, 1)
    assert node.find_stuck(10 * IDLE_S) == []


def test_rank_may_finish_its_last_save_when_a_peer_is_lost(node: WatchedNode) -> None:
    node.train()
    node.board.write_status(0, RankStatus.DONE, 0, 50, 0)
    node.board.write_status(1, RankStatus.WAITING, 1, 50, 0)
    node.detector.begin(node.ranks, 1)
    assert node.find_stuck(BUSY_S - 1) == []
    assert node.find_stuck(2.0) == [0], "it may be validating with the peer that was lost"


def test_finished_rank_gives_no_time_to_the_others(node: WatchedNode) -> None:
    node.train()
    node.board.write_status(0, RankStatus.DONE, 0, 50, 0)
    node.detector.begin(node.ranks, 1)
    assert node.find_stuck(IDLE_S - 1) == []
    assert node.find_stuck(2.0) == [1]


def test_rank_stopped_after_its_last_step_gets_no_time(node: WatchedNode) -> None:
    node.train()
    node.write_statuses(RankStatus.DONE, 0, 50)
    node.stopped_slots = frozenset({1})
    node.detector.begin(node.ranks, 1)
    assert node.find_stuck(LEAVE_S + 1) == [1]


def test_rank_that_left_for_good_before_the_next_group_is_replaced(node: WatchedNode) -> None:
    node.train()
    node.board.write_status(0, RankStatus.GONE, 0, 50, 0)
    node.board.write_status(1, RankStatus.WAITING, 1, 50, 0)
    node.detector.begin(node.ranks, 1)
    assert node.find_stuck(LEAVE_S + 1, work=1.0) == [0]


@pytest.mark.parametrize("standing", [RankStatus.JOINED, RankStatus.DONE, RankStatus.GONE])
def test_rank_that_ended_well_before_the_next_group_is_replaced(
    node: WatchedNode, standing: RankStatus
) -> None:
    node.train()
    node.board.write_status(0, standing, 0, 50, 0)
    node.board.write_status(1, RankStatus.WAITING, 1, 50, 0)
    node.detector.begin(node.ranks, 1)
    node.ranks[0].status = 0
    assert node.find_stuck(LEAVE_S + 1, work=1.0) == [0]


def test_rank_that_ended_well_before_joining_does_not_end_the_group(node: WatchedNode) -> None:
    node.train()
    node.detector.begin(node.ranks, 1)
    node.ranks[0].status = 0
    node.board.write_status(1, RankStatus.JOINED, 1, 51, 0)
    node.pass_time(1.0)
    node.pass_time(IDLE_S + 1)
    assert node.killed == [1]


def test_idle_rank_gets_no_more_time_after_a_hang_seen_by_another_node(node: WatchedNode) -> None:
    node.write_statuses(RankStatus.JOINED, 1, 3)
    node.detector.log_remote_hang()
    node.detector.begin(node.ranks, 2)
    assert node.find_stuck(IDLE_S - 1) == []
    assert node.find_stuck(2.0) == [0, 1]
    node.detector.begin(node.ranks, 3)
    assert node.find_stuck(IDLE_S + 1) == [], "the group after that one did not hang"


def test_working_rank_has_time_for_its_step_after_a_hang_seen_by_another_node(node: WatchedNode) -> None:
    """One rank evaluates. The others wait for it, and their nodes may call that a hang sooner than
    its own does.
    """
    node.train()
    node.detector.log_remote_hang()
    node.detector.begin(node.ranks, 1)
    assert node.find_stuck(BUSY_S - 1, work=1.0) == []
    assert node.find_stuck(2.0, work=1.0) == [0, 1], "as long as its own node waits for a working rank"


def test_rank_killed_in_its_step_gets_longer_for_it_the_next_time(node: WatchedNode) -> None:
    node.train()
    node.detector.begin(node.ranks, 1)
    assert node.find_stuck(IDLE_S + 1) == [0, 1]
    node.detector.begin(node.ranks, 2)
    assert node.find_stuck(2 * IDLE_S - 1) == []


def test_rank_of_a_group_that_hung_on_this_node_gets_no_time_for_a_step(waiting: WatchedNode) -> None:
    waiting.train()
    waiting.pass_time(WAITING_S + 1)
    assert waiting.detector.hang is not None
    waiting.detector.begin(waiting.ranks, 1)
    assert waiting.find_stuck(LEAVE_S + 1, work=1.0) == [0, 1], "it waits for a device in a busy loop"


def test_group_that_loads_its_model_is_not_judged_by_the_length_of_steps(node: WatchedNode) -> None:
    node.train()
    node.detector.begin(node.ranks, 1)
    for process in node.ranks:
        node.board.write_status(process.slot, RankStatus.JOINED, 1, 49, 0)
        node.board.write_joined(process.slot, joined_ns=5, stepped_ns=0, first_step=0)
    node.pass_time(0.1)
    node.pass_time(BUSY_S - 1)
    assert node.killed == []
    node.write_statuses(RankStatus.JOINED, 1, 50)
    node.pass_time(0.1)
    node.pass_time(IDLE_S + 1)
    assert node.killed == [1], "that time is not the length of a step either"


def test_replacement_of_a_stuck_rank_has_time_to_join(node: WatchedNode) -> None:
    node.board.write_status(0, RankStatus.WAITING, 2, 3, 0)
    node.board.write_status(1, RankStatus.WAITING, 1, 3, 0)
    node.detector.begin(node.ranks, 2)
    assert node.find_stuck(LEAVE_S + 1) == [1]
    node.ranks[1] = Process(1_000_009, 1)
    node.ranks[1].slot = 1
    node.detector.restart_clock()
    assert node.find_stuck(LEAVE_S - 1) == []
    assert node.find_stuck(2.0) == [1]
