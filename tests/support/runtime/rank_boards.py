"""Which of a job's processes train, and as whom: what they themselves have said on their supervisor's board.

A spare, and a rank that is still on its way, have the same command line as those that train.

A node whose ranks make steps as a test tells them to, under a real lookout: nothing is started.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.engines.fake import VirtualClock
from shoal.runtime.process import tree
from shoal.runtime.process.watcher import Process
from shoal.runtime.rank.board import MAX_SLOTS, RankBoard, RankStatus
from shoal.runtime.supervisor import hang_detector, hang_snapshot
from shoal.runtime.supervisor.hang_detector import BoardHandle, HangDetector
from shoal.runtime.supervisor.hang_snapshot import RankStacks
from shoal.runtime.supervisor.step_pace import MIN_SILENCE_S, RankActivity
from tests.support.runtime.tasks import a_task_spec


def training_pids(pids: Iterable[int]) -> dict[int, int]:
    """The process of each rank that is in the group which is newest, by rank."""
    found: dict[int, tuple[int, int]] = {}
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):  # it may end while it is looked at
            own, board = _pid_in_namespace(pid), _open_board(pid)
            for slot in range(MAX_SLOTS):
                beat, place = board.heartbeat(slot), board.assignment(slot)
                if beat.pid == own and beat.status is RankStatus.JOINED and place is not None:
                    found[place.rank] = max(found.get(place.rank, (-1, 0)), (beat.rendezvous_round, pid))
    newest = max((generation for generation, _ in found.values()), default=0)
    return {rank: pid for rank, (generation, pid) in sorted(found.items()) if generation == newest}


def _pid_in_namespace(pid: int) -> int:
    """The number that the process itself knows."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("NSpid")).split()[-1])


def _open_board(pid: int) -> RankBoard:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if "memfd:shoal-board" in str(link.readlink()):
            fd = os.open(link, os.O_RDWR)
            try:
                return RankBoard(fd)
            finally:
                os.close(fd)
    raise ValueError(f"{pid} has no board")


STEP_S, LOOK_S = 0.1, 0.25
STOPPED_S, IDLE_S, BUSY_S = (
    MIN_SILENCE_S[doing] for doing in (RankActivity.STOPPED, RankActivity.NOTHING, RankActivity.WORK)
)
WAITING_S = MIN_SILENCE_S[RankActivity.WAITING]


class WatchedNode:
    """Two ranks that make steps as they are told to, on a node of several or the only one."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, nodes: int = 1, waits_for_others: bool = False
    ) -> None:
        self.clock, self.cpu_s = VirtualClock(), 0.0
        self.can_read_cpu = True
        self.killed: list[int | None] = []
        self.logged_stacks: list[str] = []
        self.num_snapshots = 0
        self.stopped_slots: frozenset[int] = frozenset()
        self.is_in_kernel = self.is_saving = False
        self.waits_for_others = waits_for_others
        self.fd, self.board = RankBoard.create()
        self.ranks = [Process(1_000_000 + rank, rank) for rank in range(2)]
        for slot, process in enumerate(self.ranks):
            process.slot = slot
        monkeypatch.setattr(hang_detector, "kill_group", lambda process: self.killed.append(process.rank))
        monkeypatch.setattr(hang_snapshot, "take_snapshot", self._take_snapshot)
        monkeypatch.setattr(hang_snapshot, "stopped_slots", lambda *_, **__: self.stopped_slots)
        monkeypatch.setattr(tree, "is_any_in_kernel", lambda _: self.is_in_kernel)
        confinement: Any = SimpleNamespace(
            work_seconds=lambda: self.cpu_s if self.can_read_cpu else None,
            processes=set,
            path="",
            sandbox=None,
        )
        watcher: Any = SimpleNamespace(log_stacks=lambda _, text: self.logged_stacks.append(text))
        order = a_task_spec(node="n1", nodes=tuple(f"n{number}" for number in range(1, nodes + 1)))
        page = BoardHandle(fd=self.fd, board=self.board)
        self.detector = HangDetector(order, confinement, watcher, self.clock, page, "/nowhere/work")
        self.detector.begin(self.ranks, 0)

    def _take_snapshot(
        self, ranks: list[Process], board: RankBoard, *_: object, has_own_namespace: bool
    ) -> hang_snapshot.HangSnapshot:
        self.num_snapshots += 1
        self.during_snapshot()
        return hang_snapshot.HangSnapshot(
            step=min(board.heartbeat(process.slot).step for process in ranks),
            stacks=tuple(
                (process, RankStacks(text=f"look {self.num_snapshots}", frame="a.py:1")) for process in ranks
            ),
            stopped=frozenset(),
            culprits=(ranks[1],),
            waits_for_others=self.waits_for_others and not self.stopped_slots,
            is_saving=self.is_saving,
        )

    def during_snapshot(self) -> None:
        """What happens in the two seconds that it takes."""

    def write_statuses(self, status: RankStatus, rendezvous_round: int, step: int) -> None:
        for process in self.ranks:
            self.board.write_status(process.slot, status, rendezvous_round, step, 0)
            self.board.write_joined(process.slot, joined_ns=1, stepped_ns=int(step > 0), first_step=1)

    def train(self, steps: int = 50, step_s: float = STEP_S) -> None:
        first = self.board.heartbeat(0).step + 1
        for step in range(first, first + steps):
            self.write_statuses(RankStatus.JOINED, 0, step)
            self.pass_time(step_s, work=1.0)

    def pass_time(self, seconds: float, *, work: float = 0.0, has_spare_settled: bool = False) -> None:
        """Somebody uses this share of a processor; there are looks all the time, and one at the end."""
        for step_s in self._moments(seconds):
            self.sleep(step_s, work=work)
            self.detector.check(has_spare_settled=has_spare_settled)

    def find_stuck(self, seconds: float = 0.0, *, work: float = 0.0) -> list[int | None]:
        """Who is found to be so in that time."""
        found: list[int | None] = []
        for step_s in self._moments(seconds):
            self.sleep(step_s, work=work)
            found += [process.rank for process in self.detector.stuck_ranks()]
        return found

    def sleep(self, seconds: float, *, work: float = 0.0) -> None:
        """Nobody looks."""
        self.clock.advance(seconds)
        self.cpu_s += work * seconds

    @staticmethod
    def _moments(seconds: float) -> list[float]:
        return [LOOK_S] * int(seconds / LOOK_S) + [seconds % LOOK_S]
