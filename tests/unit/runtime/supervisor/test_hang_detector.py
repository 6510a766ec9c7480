"""When ranks are examined for a hang, and which of them are killed."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest

from shoal.runtime.rank.board import RankStatus
from shoal.runtime.supervisor import hang_detector, hang_snapshot
from shoal.runtime.supervisor.step_pace import LEAVE_S
from tests.support.runtime.rank_boards import BUSY_S, IDLE_S, LOOK_S, STOPPED_S, WAITING_S, WatchedNode


def test_rank_that_holds_up_the_others_is_killed_once_and_all_stacks_are_logged(node: WatchedNode) -> None:
    node.train()
    node.pass_time(IDLE_S - 1)
    assert (node.num_snapshots, node.killed, node.detector.hang) == (0, [], None)
    node.pass_time(2.0)
    node.pass_time(IDLE_S)
    assert (node.killed, node.logged_stacks) == ([1], ["look 1", "look 1"])
    assert node.detector.hang is not None
    assert (node.detector.hang.rank, node.detector.hang.frame) == (1, "a.py:1")


class TestStopped:
    """A rank that was stopped with a signal."""

    def test_it_is_found_within_seconds_even_if_other_ranks_work(self, node: WatchedNode) -> None:
        node.train()
        node.stopped_slots = frozenset({1})
        node.pass_time(STOPPED_S - 0.2, work=1.0)
        assert node.num_snapshots == 0
        node.pass_time(3 * LOOK_S, work=1.0)
        assert node.killed == [1]

    @pytest.mark.parametrize("status", [RankStatus.DONE, RankStatus.GONE])
    def test_it_is_found_between_two_epochs_and_not_after_training(
        self, node: WatchedNode, status: RankStatus
    ) -> None:
        node.train()
        node.board.write_status(0, status, 0, 50, 0)
        node.pass_time(BUSY_S)
        node.stopped_slots = frozenset({1})
        node.pass_time(3 * hang_detector.STATE_CHECK_S)
        assert node.killed == ([1] if status is RankStatus.DONE else [])

    def test_rank_stopped_for_a_moment_is_not_killed(self, node: WatchedNode) -> None:
        node.train()
        node.pass_time(1.5 * STOPPED_S)
        for _ in range(3):
            node.stopped_slots = frozenset({1})
            node.sleep(hang_detector.STATE_CHECK_S)
            node.pass_time(0.0)
            node.stopped_slots = frozenset()
            node.pass_time(LOOK_S)
        assert node.num_snapshots == 0

    def test_rank_continued_during_the_snapshot_is_not_killed(
        self, node: WatchedNode, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        node.train()
        node.stopped_slots = frozenset({1})
        monkeypatch.setattr(node, "during_snapshot", lambda: setattr(node, "stopped_slots", frozenset()))
        node.pass_time(3 * STOPPED_S)
        assert (node.num_snapshots, node.killed) == (1, [])

    def test_it_is_told_apart_from_an_idle_rank_if_steps_are_long(self, node: WatchedNode) -> None:
        """Both have the same limit there, and a drill on one teaches nothing about the other."""
        for count, halted in ((1, frozenset({1})), (2, frozenset[int]())):
            node.train(step_s=3.0)
            node.train(1, step_s=0.0)
            node.detector.expect_hang()
            node.stopped_slots = halted
            node.pass_time(8 * 3.0 - 1)
            assert len(node.killed) == count - 1
            node.pass_time(2.0)
            assert len(node.killed) == count
            node.stopped_slots = frozenset()
            node.detector.begin(node.ranks, 0)

    @pytest.mark.parametrize("is_drill", [True, False])
    def test_it_is_found_later_the_next_time_unless_a_drill_stopped_it(
        self, node: WatchedNode, is_drill: bool
    ) -> None:
        node.train()
        if is_drill:
            node.detector.expect_hang()
        node.stopped_slots = frozenset({1})
        node.pass_time(2 * STOPPED_S)
        assert node.killed == [1]
        node.stopped_slots = frozenset()
        node.detector.begin(node.ranks, 0)
        node.train()
        node.stopped_slots = frozenset({1})
        node.pass_time(2 * STOPPED_S)
        assert node.killed == ([1, 1] if is_drill else [1])
        node.pass_time(3 * STOPPED_S)
        assert node.killed == [1, 1]


class TestHealthy:
    """Ranks that make no step for good reasons."""

    def test_evaluation_of_many_minutes_is_no_hang(self, node: WatchedNode) -> None:
        node.train()
        node.pass_time(BUSY_S - 10, work=1.0)
        assert node.num_snapshots == 0

    def test_seconds_without_work_are_no_hang(self, node: WatchedNode) -> None:
        node.train()
        for _ in range(3):
            node.pass_time(IDLE_S - 2)
            node.train(1)
        assert node.num_snapshots == 0

    @pytest.mark.parametrize("step_s", [0.1, 2.4, 3.0, 10.0, 30.0])
    def test_rank_that_waits_for_a_disk_counts_as_working(self, node: WatchedNode, step_s: float) -> None:
        node.train(step_s=step_s)
        node.train(1, step_s=0.0)
        node.is_in_kernel = True
        node.pass_time(min(10 * max(IDLE_S, 8 * step_s), BUSY_S - 2 * step_s))
        assert node.num_snapshots == 0

    def test_rank_that_waits_for_a_disk_counts_as_working_after_earlier_hangs(
        self, node: WatchedNode
    ) -> None:
        for _ in range(6):
            node.train()
            node.stopped_slots = frozenset({1})
            node.pass_time(3 * IDLE_S, work=1.0)
            node.stopped_slots = frozenset()
            node.detector.begin(node.ranks, 0)
        assert len(node.killed) > 4
        looks = node.num_snapshots
        node.train()
        node.is_in_kernel = True
        node.pass_time(10 * IDLE_S)
        assert node.num_snapshots == looks

    def test_silence_of_the_same_length_as_a_hang_is_no_hang_the_next_time(self, node: WatchedNode) -> None:
        node.train()
        node.pass_time(IDLE_S + 1)
        assert node.killed == [1]
        node.detector.begin(node.ranks, 0)
        node.train()
        node.pass_time(2 * IDLE_S - 1)
        assert node.killed == [1]

    def test_sleep_of_the_machine_is_no_hang(self, node: WatchedNode) -> None:
        node.train()
        node.pass_time(1.0)
        node.sleep(3600.0)
        node.pass_time(IDLE_S - 1)
        assert node.num_snapshots == 0
        node.write_statuses(RankStatus.JOINED, 0, 50)
        node.pass_time(0.0)
        node.sleep(3600.0)
        node.pass_time(0.0)
        node.train()
        node.pass_time(IDLE_S + 1)
        assert node.killed == [1], "the sleep is not the length of a step either"

    def test_sleep_of_the_machine_while_a_group_forms_is_no_hang(self, node: WatchedNode) -> None:
        node.write_statuses(RankStatus.WAITING, 1, 3)
        node.detector.begin(node.ranks, 2)
        assert node.find_stuck(LEAVE_S - 1) == []
        node.sleep(3600.0)
        assert node.find_stuck(LEAVE_S - 1) == []
        assert node.find_stuck(2.0) == [0, 1]

    def test_rank_that_makes_a_step_during_the_snapshot_is_not_killed(
        self, node: WatchedNode, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        node.train()
        monkeypatch.setattr(node, "during_snapshot", lambda: node.write_statuses(RankStatus.JOINED, 0, 60))
        node.pass_time(IDLE_S + 1)
        assert (node.num_snapshots, node.killed, node.detector.hang) == (1, [], None)

    @pytest.mark.parametrize("status", [RankStatus.DONE, RankStatus.GONE])
    def test_no_rank_is_late_after_the_last_step_of_any_rank(
        self, node: WatchedNode, status: RankStatus
    ) -> None:
        """The last save, or the program's work after training, may take any time."""
        node.train()
        node.board.write_status(0, status, 0, 50, 1)
        node.pass_time(2 * BUSY_S)
        assert node.num_snapshots == 0
        node.board.write_status(0, RankStatus.JOINED, 0, 50, 2)
        node.pass_time(IDLE_S - 1)
        assert node.num_snapshots == 0, "it goes on to more steps"
        node.pass_time(2.0)
        assert node.killed == [1]

    def test_validation_between_two_epochs_is_neither_a_silence_nor_a_step(self, node: WatchedNode) -> None:
        for _ in range(3):
            node.train()
            node.write_statuses(RankStatus.DONE, 0, node.board.heartbeat(0).step)
            node.pass_time(2 * BUSY_S)
        node.train(10)
        assert node.num_snapshots == 0
        node.train(1, step_s=0.0)
        node.pass_time(IDLE_S + 1)
        assert node.killed == [1]

    def test_validation_between_two_checks_makes_no_step_longer(self, node: WatchedNode) -> None:
        node.train()
        for step in (50, 60):
            node.write_statuses(RankStatus.DONE, 0, step)
            node.pass_time(BUSY_S)
        node.train(1, step_s=0.0)
        node.pass_time(IDLE_S + 1)
        assert node.killed == [1]

    def test_no_rank_is_late_after_one_has_ended_well(self, node: WatchedNode) -> None:
        node.train()
        node.ranks[0].status = 0
        node.pass_time(2 * BUSY_S)
        assert node.num_snapshots == 0

    def test_no_rank_counts_as_idle_if_its_work_cannot_be_read(self, node: WatchedNode) -> None:
        node.train()
        node.can_read_cpu = False
        node.pass_time(10 * IDLE_S)
        assert (node.num_snapshots, node.find_stuck(10 * IDLE_S)) == (0, [])
        node.can_read_cpu = True
        node.pass_time(IDLE_S - 1)
        assert node.num_snapshots == 0
        node.pass_time(2.0)
        assert node.killed == [1]

    def test_only_node_of_a_job_waits_for_a_checkpoint_being_saved(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        node = WatchedNode(monkeypatch, waits_for_others=True)
        node.is_saving = True
        node.train()
        node.pass_time(WAITING_S - 1)
        assert node.killed == []
        node.pass_time(2.0)
        assert node.killed == [1]


def test_work_of_a_starting_spare_does_not_hide_a_hang(node: WatchedNode) -> None:
    node.train()
    node.detector.expect_spare()
    node.pass_time(3 * IDLE_S, work=0.9)
    assert node.killed == [], "as far as can be told, the ranks work"
    node.pass_time(0.0, has_spare_settled=True)
    assert node.killed == [], "the ranks may have worked until now as well"
    node.pass_time(1.5 * IDLE_S, has_spare_settled=True)
    assert node.killed == [1]


def test_waiting_spare_does_not_explain_work_of_the_ranks(node: WatchedNode) -> None:
    node.train()
    node.detector.expect_spare()
    node.pass_time(0.2, has_spare_settled=True)
    node.pass_time(4 * IDLE_S, work=0.9, has_spare_settled=True)
    assert node.killed == []


def test_ranks_stopped_by_shoal_do_not_hang_and_have_their_time_when_they_continue(node: WatchedNode) -> None:
    node.train()
    node.detector.pause()
    node.pass_time(10 * IDLE_S)
    node.detector.resume()
    node.pass_time(0.1)
    assert (node.num_snapshots, node.killed) == (0, [])
    node.pass_time(2 * IDLE_S)
    assert node.killed == [1], "the ranks are checked again from then on"


def test_one_process_that_may_not_be_killed_does_not_save_the_others(
    node: WatchedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(pid: int, number: int) -> None:
        raise PermissionError(pid, number)

    look = node._take_snapshot

    def with_a_stopped_one(*arguments: Any, **more: Any) -> hang_snapshot.HangSnapshot:
        return msgspec.structs.replace(look(*arguments, **more), stopped=frozenset({1_000_005}))

    monkeypatch.setattr(hang_snapshot, "take_snapshot", with_a_stopped_one)
    monkeypatch.setattr(os, "kill", kill)
    node.train()
    node.pass_time(IDLE_S + 1)
    assert node.killed == [1]
    assert node.detector.hang is not None


def test_hang_records_the_killed_rank_and_the_time(node: WatchedNode) -> None:
    node.train()
    began_at = node.clock.monotonic()
    node.pass_time(IDLE_S + 1)
    assert [process.was_killed for process in node.ranks] == [False, True]
    assert began_at + IDLE_S < node.detector.killed_at <= node.clock.monotonic()
