"""The status that a rank reports around its steps. Work after the last step is no step."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from shoal.runtime.rank import loop
from shoal.runtime.rank.board import BOARD_VARIABLE, RankAssignment, RankBoard, RankStatus
from shoal.runtime.rank.checkpoint.checkpoints import Checkpoints
from shoal.runtime.rank.graceful_stop import GracefulExit, GracefulStop
from shoal.runtime.rank.loop import Run
from shoal.runtime.rank.membership import RankMembership


class Saves(Checkpoints):
    """Records only the rank's status while it waits for its last save."""

    def __init__(self, board: RankBoard) -> None:
        self.board = board
        self.seen: list[RankStatus] = []
        self.stalled_s = 0.0

    def load(self, parts: object) -> None:
        """There is none."""

    def is_due(self, step: int) -> bool:
        return False

    def save(self, parts: object, step: int) -> None:
        self.step = step

    def wait(self) -> int | None:
        self.seen.append(self.board.heartbeat(0).status)
        return getattr(self, "step", None)


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankBoard]:
    """The page of a rank that is alone in its group."""
    fd, made = RankBoard.create()
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT", "SHOAL_RENDEZVOUS_ROUND", "GROUP_RANK"):
        monkeypatch.setenv(name, "0")  # `train` sets them, and the fixture restores them
    monkeypatch.setenv(BOARD_VARIABLE, f"{fd}:0")
    made.assign(0, RankAssignment(rendezvous_round=0, rank=0, local_rank=0, master_port=1))
    leaving = ("_leave_together", "leave_group")
    for name in ("_join", "synchronize", "instrument_torch", "watch_groups", *leaving):
        monkeypatch.setattr(loop, name, lambda *_: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    yield made
    os.close(fd)


def standing(board: RankBoard) -> RankStatus:
    return board.heartbeat(0).status


def test_rank_is_done_while_it_waits_for_its_last_save_and_gone_after_that(board: RankBoard) -> None:
    seen: list[RankStatus] = []
    saves = Saves(board)

    def program(run: Run) -> None:
        for step in run.steps(3):
            seen.append(standing(board))
            if step == 1:
                break

    loop.train(program, {}, checkpoints=saves, timeout_s=7200.0)
    assert seen == [RankStatus.JOINED] * 2
    assert saves.seen == [RankStatus.DONE]
    assert standing(board) is RankStatus.GONE
    assert board.heartbeat(0).timeout_s == 7200


def test_rank_is_done_between_the_ends_of_its_steps(board: RankBoard) -> None:
    seen: list[RankStatus] = []

    def program(run: Run) -> None:
        for total in (2, 4):
            seen.extend(standing(board) for _ in run.steps(total))
            seen.append(standing(board))  # for example an evaluation

    loop.train(program, {})
    training = [RankStatus.JOINED] * 2
    assert seen == [*training, RankStatus.DONE, *training, RankStatus.DONE]


def test_rank_that_saves_because_it_was_asked_to_stop_is_done(
    board: RankBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GracefulStop, "is_stop_step", lambda _, step: step == 2)
    monkeypatch.setattr(GracefulStop, "listen", lambda _: None)
    saves = Saves(board)

    def program(run: Run) -> None:
        for _ in run.steps(5):
            pass

    with pytest.raises(GracefulExit):
        loop.train(program, {}, checkpoints=saves)
    assert saves.seen == [RankStatus.DONE]


def test_torch_names_the_rank_once_however_many_groups_it_was_in(
    board: RankBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[str] = []
    joined: list[int] = []

    def join(*_: object) -> None:
        """As `init_process_group` does."""
        before = sys.excepthook

        def named(*error: Any) -> None:
            printed.append("rank 0")
            before(*error)

        monkeypatch.setattr(sys, "excepthook", named)
        joined.append(len(joined))

    def program(_: Run) -> None:
        raise RuntimeError("a peer is gone")

    monkeypatch.setattr(sys, "excepthook", lambda *_: printed.append("the error"))
    monkeypatch.setattr(loop, "_join", join)
    place = RankAssignment(rendezvous_round=0, rank=0, local_rank=0, master_port=1)
    monkeypatch.setattr(RankMembership, "wait_for_round", lambda _: place)
    monkeypatch.setattr(RankMembership, "is_group_over", lambda *_: len(joined) < 3)
    with pytest.raises(RuntimeError):
        loop.train(program, {})
    printed.clear()
    sys.excepthook(RuntimeError, RuntimeError(), None)
    assert (len(joined), printed) == (3, ["rank 0", "the error"])
