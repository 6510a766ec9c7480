"""Of a job on several nodes: who looks early, who waits for another node, and for how long."""

from __future__ import annotations

import pytest

from shoal.runtime import lookout
from tests.support.watched_node import ELSEWHERE_S, IDLE_S, STOPPED_S, Node


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
