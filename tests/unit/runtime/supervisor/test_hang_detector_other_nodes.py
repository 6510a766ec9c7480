"""Hangs of a job on several nodes: which node takes an early snapshot, which waits for another, and
how long.
"""

from __future__ import annotations

import pytest

from shoal.runtime.supervisor import hang_detector
from tests.support.runtime.rank_boards import IDLE_S, STOPPED_S, WAITING_S, WatchedNode


def test_early_snapshot_is_logged_when_another_node_ends_the_group(waiting: WatchedNode) -> None:
    """The other node may have seen that its rank was stopped, which takes it a second."""
    waiting.train()
    waiting.pass_time(0.6 * STOPPED_S)
    waiting.pass_time(STOPPED_S)
    assert (waiting.num_snapshots, waiting.logged_stacks) == (1, []), (
        "one snapshot, which is not logged because it may mean nothing"
    )
    waiting.detector.log_remote_hang()
    assert (waiting.logged_stacks, waiting.killed) == (["look 1", "look 1"], [])


def test_early_snapshot_of_a_step_that_completes_is_dropped(waiting: WatchedNode) -> None:
    waiting.train()
    waiting.pass_time(0.6 * STOPPED_S)
    waiting.train(1)
    waiting.detector.log_remote_hang()
    assert (waiting.num_snapshots, waiting.logged_stacks) == (1, [])


def test_working_ranks_get_no_early_snapshot(waiting: WatchedNode) -> None:
    waiting.train()
    waiting.pass_time(10 * IDLE_S, work=1.0)
    assert waiting.num_snapshots == 0


def test_only_node_of_a_job_takes_no_early_snapshot(node: WatchedNode) -> None:
    node.train()
    node.pass_time(0.6 * IDLE_S)
    assert node.num_snapshots == 0


def test_node_whose_ranks_all_wait_kills_none_and_ends_only_the_group(
    waiting: WatchedNode,
) -> None:
    """The rank that they wait for may evaluate. If it hangs, its own node sees that much sooner."""
    waiting.train()
    waiting.pass_time(WAITING_S - 1)
    assert (waiting.logged_stacks, waiting.detector.hang) == ([], None)
    waiting.pass_time(2.0)
    assert waiting.detector.hang is not None
    assert (waiting.detector.hang.rank, waiting.killed, len(waiting.logged_stacks)) == (None, [], 2)


def test_longer_timeout_of_collectives_extends_the_limit(waiting: WatchedNode) -> None:
    waiting.train()
    waiting.board.write_timeout(1, 2 * WAITING_S)
    waiting.pass_time(2 * WAITING_S - 1)
    assert waiting.detector.hang is None
    waiting.pass_time(2.0)
    assert waiting.detector.hang is not None


def test_rank_that_waited_and_then_hangs_is_found(waiting: WatchedNode) -> None:
    waiting.train()
    waiting.pass_time(1.5 * IDLE_S)
    assert (waiting.killed, waiting.detector.hang) == ([], None)
    waiting.waits_for_others = False
    waiting.pass_time(IDLE_S)
    assert waiting.killed == [1]


def test_rank_stopped_while_its_node_waits_for_others_is_found(waiting: WatchedNode) -> None:
    waiting.train()
    waiting.pass_time(1.5 * IDLE_S)
    waiting.stopped_slots = frozenset({1})
    waiting.pass_time(2 * hang_detector.STATE_CHECK_S)
    assert waiting.killed == [1]


def test_only_node_of_a_job_waits_for_no_other_node(monkeypatch: pytest.MonkeyPatch) -> None:
    node = WatchedNode(monkeypatch, nodes=1, waits_for_others=True)
    node.train()
    node.pass_time(IDLE_S + 1)
    assert node.killed == [1]
