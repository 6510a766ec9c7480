"""Whether a rank takes an error for the loss of a peer, once it is told so, or for its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shoal.runtime.rank import membership as module
from shoal.runtime.rank.board import BOARD_VARIABLE, RankAssignment, RankBoard
from shoal.runtime.rank.membership import FAR_PEERS_S, PEERS_S, RankMembership


class Waiting:
    """A clock that only `sleep` advances, with events at given times."""

    def __init__(self) -> None:
        self.now = 0.0
        self.board: RankBoard | None = None
        self.told_at = float("inf")

    def monotonic(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return int(self.now * 1e9)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.told_at and self.board is not None:
            self.board.assign(0, RankAssignment(rendezvous_round=1, rank=0, local_rank=0, master_port=1))


@contextmanager
def a_member(monkeypatch: pytest.MonkeyPatch, num_nodes: int) -> Iterator[tuple[RankMembership, Waiting]]:
    fd, board = RankBoard.create()
    monkeypatch.setenv(BOARD_VARIABLE, f"{fd}:0")
    monkeypatch.setenv("GROUP_WORLD_SIZE", str(num_nodes))
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT", "SHOAL_RENDEZVOUS_ROUND", "GROUP_RANK"):
        monkeypatch.setenv(
            name, os.environ.get(name, "0")
        )  # the membership sets them, and the fixture restores them
    clock = Waiting()
    monkeypatch.setattr(module, "time", clock)
    board.assign(0, RankAssignment(rendezvous_round=0, rank=0, local_rank=0, master_port=1))
    member = RankMembership()
    assert member.wait_for_round().rendezvous_round == 0
    clock.board = board
    yield member, clock


@pytest.mark.parametrize(
    ("num_nodes", "error", "patience_s"),
    [
        (1, RuntimeError("Connection closed by peer"), PEERS_S),
        (2, RuntimeError("Connection closed by peer"), FAR_PEERS_S),
        (2, ConnectionResetError("by peer"), FAR_PEERS_S),
        (2, ValueError("of the program itself"), PEERS_S),
    ],
)
def test_word_of_a_peers_end_is_waited_for_longer_where_it_comes_from_another_node(
    monkeypatch: pytest.MonkeyPatch, num_nodes: int, error: Exception, patience_s: float
) -> None:
    with a_member(monkeypatch, num_nodes) as (member, clock):
        clock.told_at = patience_s - 0.5
        assert member.is_group_over(error)
    with a_member(monkeypatch, num_nodes) as (member, clock):
        clock.told_at = patience_s + 0.5
        assert not member.is_group_over(error), "nobody told it in time: the error is its own"
