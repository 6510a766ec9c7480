"""Which ranks a hang snapshot names as those that hold up the others."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from shoal.runtime.process import tree
from shoal.runtime.process.watcher import Process
from shoal.runtime.rank.board import RankBoard, RankStatus
from shoal.runtime.supervisor import hang_snapshot
from shoal.runtime.supervisor.hang_snapshot import HangSnapshot, RankStacks, StackTarget

RANKS, OTHER = (1_000_001, 1_000_002), 1_000_003
"""Two ranks, and a process that one of them has started."""


class WaitingRanks:
    """Two ranks that wait inside PyTorch. Some of their processes are stopped."""

    def __init__(self) -> None:
        self.fd, self.board = RankBoard.create()
        self.stopped: set[int] = set()
        self.namespace_flags: list[bool] = []
        self.ranks = [Process(pid, rank) for rank, pid in enumerate(RANKS)]
        for slot, process in enumerate(self.ranks):
            process.slot = slot
            self.board.write_process(slot, process.pid, can_dump_stacks=True)
            self.board.write_status(slot, RankStatus.JOINED, 0, 7, 0)

    def own_pids(self, inner: Iterator[int], pids: set[int], *, has_own_namespace: bool) -> dict[int, int]:
        self.namespace_flags.append(has_own_namespace)
        return {pid: pid for pid in inner if pid in pids}

    def taken(self, targets: list[StackTarget], *_: object) -> dict[int, RankStacks]:
        return {target.slot: RankStacks(text="", frame="a.py:1", is_waiting=True) for target in targets}

    def look(self) -> HangSnapshot:
        return hang_snapshot.take_snapshot(
            self.ranks, self.board, self.fd, {*RANKS, OTHER}, "", has_own_namespace=True
        )


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[WaitingRanks]:
    watched = WaitingRanks()
    monkeypatch.setattr(hang_snapshot, "host_pids", watched.own_pids)
    monkeypatch.setattr(hang_snapshot, "take_stacks", watched.taken)
    for name in ("stopped_or_traced", "stopped_by_signal"):
        monkeypatch.setattr(tree, name, lambda _: watched.stopped)
    yield watched
    os.close(watched.fd)


def test_stopped_rank_is_the_culprit(seen: WaitingRanks) -> None:
    seen.stopped = {RANKS[1]}
    snapshot = seen.look()
    assert ([process.rank for process in snapshot.culprits], snapshot.waits_for_others) == ([1], False)
    assert hang_snapshot.stopped_slots(seen.ranks, seen.board, set(), has_own_namespace=True) == {1}


def test_stopped_child_of_a_rank_does_not_make_it_a_culprit(seen: WaitingRanks) -> None:
    """For example, a debugger that one of them has started."""
    seen.stopped = {OTHER}
    assert seen.look().waits_for_others
    assert hang_snapshot.stopped_slots(seen.ranks, seen.board, set(), has_own_namespace=True) == frozenset()


def test_ranks_are_found_by_the_pids_of_their_own_namespace(seen: WaitingRanks) -> None:
    seen.stopped = {OTHER}
    seen.look()
    hang_snapshot.stopped_slots(seen.ranks, seen.board, set(), has_own_namespace=True)
    assert seen.namespace_flags == [True, True]
