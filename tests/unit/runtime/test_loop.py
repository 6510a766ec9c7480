"""What a rank says of itself around its steps: what comes after the last one is no step."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from shoal.runtime.board import VARIABLE, Board, Place, Standing
from shoal.runtime.rank import loop
from shoal.runtime.rank.checkpoint.checkpoints import Checkpoints
from shoal.runtime.rank.farewell import Farewell, Gone
from shoal.runtime.rank.loop import Run
from shoal.runtime.rank.member import Member


class Saves(Checkpoints):
    """Only notes where the rank is said to be when it waits for its last save."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.seen: list[Standing] = []
        self.stalled_s = 0.0

    def load(self, parts: object) -> None:
        """There is none."""

    def is_due(self, step: int) -> bool:
        return False

    def save(self, parts: object, step: int) -> None:
        self.step = step

    def wait(self) -> int | None:
        self.seen.append(self.board.beat(0).standing)
        return getattr(self, "step", None)


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[Board]:
    """The page of a rank that is alone in its group."""
    fd, made = Board.make()
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT", "SHOAL_GENERATION", "GROUP_RANK"):
        monkeypatch.setenv(name, "0")  # which it sets, and which are given back
    monkeypatch.setenv(VARIABLE, f"{fd}:0")
    made.assign(0, Place(generation=0, rank=0, local_rank=0, master_port=1))
    for name in ("_join", "level", "watch", "watch_groups", "_end", "leave"):
        monkeypatch.setattr(loop, name, lambda *_: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    yield made
    os.close(fd)


def standing(board: Board) -> Standing:
    return board.beat(0).standing


def test_rank_is_done_while_it_waits_for_its_last_save_and_gone_after_that(board: Board) -> None:
    seen: list[Standing] = []
    saves = Saves(board)

    def program(run: Run) -> None:
        for step in run.steps(3):
            seen.append(standing(board))
            if step == 1:
                break

    loop.train(program, {}, checkpoints=saves, timeout_s=7200.0)
    assert seen == [Standing.JOINED] * 2
    assert saves.seen == [Standing.DONE]
    assert standing(board) is Standing.GONE
    assert board.beat(0).timeout_s == 7200


def test_rank_is_done_between_the_ends_of_its_steps(board: Board) -> None:
    seen: list[Standing] = []

    def program(run: Run) -> None:
        for total in (2, 4):
            seen.extend(standing(board) for _ in run.steps(total))
            seen.append(standing(board))  # an evaluation, say

    loop.train(program, {})
    training = [Standing.JOINED] * 2
    assert seen == [*training, Standing.DONE, *training, Standing.DONE]


def test_rank_that_saves_because_it_was_asked_to_stop_is_done(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Farewell, "is_time", lambda _, step: step == 2)
    monkeypatch.setattr(Farewell, "listen", lambda _: None)
    saves = Saves(board)

    def program(run: Run) -> None:
        for _ in run.steps(5):
            pass

    with pytest.raises(Gone):
        loop.train(program, {}, checkpoints=saves)
    assert saves.seen == [Standing.DONE]


def test_torch_names_the_rank_once_however_many_groups_it_was_in(
    board: Board, monkeypatch: pytest.MonkeyPatch
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
    place = Place(generation=0, rank=0, local_rank=0, master_port=1)
    monkeypatch.setattr(Member, "next", lambda _: place)
    monkeypatch.setattr(Member, "is_group_over", lambda *_: len(joined) < 3)
    with pytest.raises(RuntimeError):
        loop.train(program, {})
    printed.clear()
    sys.excepthook(RuntimeError, RuntimeError(), None)
    assert (len(joined), printed) == (3, ["rank 0", "the error"])
