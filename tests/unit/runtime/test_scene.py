"""Who is seen to hold up the others."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from shoal.runtime import scene, stacks, tree
from shoal.runtime.board import Board, Standing
from shoal.runtime.scene import Scene
from shoal.runtime.stacks import Stacks, Subject
from shoal.runtime.watch import Process

RANKS, OTHER = (1_000_001, 1_000_002), 1_000_003
"""Two ranks, and a process that one of them has started."""


class Seen:
    """Two ranks that wait inside of PyTorch, some of whose processes are stopped."""

    def __init__(self) -> None:
        self.fd, self.board = Board.make()
        self.stopped: set[int] = set()
        self.asked: list[bool] = []
        self.ranks = [Process(pid, rank) for rank, pid in enumerate(RANKS)]
        for slot, process in enumerate(self.ranks):
            process.slot = slot
            self.board.introduce(slot, process.pid, can_answer=True)
            self.board.say(slot, Standing.JOINED, 0, 7, 0)

    def own_pids(self, inner: Iterator[int], pids: set[int], *, is_inside: bool) -> dict[int, int]:
        self.asked.append(is_inside)
        return {pid: pid for pid in inner if pid in pids}

    def taken(self, subjects: list[Subject], *_: object) -> dict[int, Stacks]:
        return {one.slot: Stacks(text="", place="a.py:1", is_waiting=True) for one in subjects}

    def look(self) -> Scene:
        return scene.look(self.ranks, self.board, self.fd, {*RANKS, OTHER}, "", is_inside=True)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    made = Seen()
    monkeypatch.setattr(stacks, "own_pids", made.own_pids)
    monkeypatch.setattr(stacks, "taken", made.taken)
    for name in ("stopped", "halted"):
        monkeypatch.setattr(tree, name, lambda _: made.stopped)
    yield made
    os.close(made.fd)


def test_rank_that_is_stopped_is_the_one(seen: Seen) -> None:
    seen.stopped = {RANKS[1]}
    found = seen.look()
    assert ([one.rank for one in found.culprits], found.is_elsewhere) == ([1], False)
    assert scene.halted(seen.ranks, seen.board, set(), is_inside=True) == {1}


def test_ranks_that_wait_do_so_for_another_node_whatever_of_theirs_is_stopped(seen: Seen) -> None:
    """A debugger that one of them has started, say."""
    seen.stopped = {OTHER}
    assert seen.look().is_elsewhere
    assert scene.halted(seen.ranks, seen.board, set(), is_inside=True) == frozenset()


def test_ranks_are_found_by_the_numbers_of_their_own_namespace(seen: Seen) -> None:
    seen.stopped = {OTHER}
    seen.look()
    scene.halted(seen.ranks, seen.board, set(), is_inside=True)
    assert seen.asked == [True, True]
