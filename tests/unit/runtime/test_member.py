"""What a rank takes an error of its own for: the end of a peer, once it is told so, or its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shoal.runtime.board import VARIABLE, Board, Place
from shoal.runtime.rank import member as module
from shoal.runtime.rank.member import FAR_PEERS_S, PEERS_S, Member


class Waiting:
    """A clock that goes on by being slept on; what comes at a moment comes then."""

    def __init__(self) -> None:
        self.now = 0.0
        self.board: Board | None = None
        self.told_at = float("inf")

    def monotonic(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return int(self.now * 1e9)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.told_at and self.board is not None:
            self.board.assign(0, Place(generation=1, rank=0, local_rank=0, master_port=1))


@contextmanager
def a_member(monkeypatch: pytest.MonkeyPatch, num_nodes: int) -> Iterator[tuple[Member, Waiting]]:
    fd, board = Board.make()
    monkeypatch.setenv(VARIABLE, f"{fd}:0")
    monkeypatch.setenv("GROUP_WORLD_SIZE", str(num_nodes))
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT", "SHOAL_GENERATION", "GROUP_RANK"):
        monkeypatch.setenv(name, os.environ.get(name, "0"))  # which it sets, and which are given back
    clock = Waiting()
    monkeypatch.setattr(module, "time", clock)
    board.assign(0, Place(generation=0, rank=0, local_rank=0, master_port=1))
    member = Member()
    assert member.next().generation == 0
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
