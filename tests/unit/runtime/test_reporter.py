"""What callbacks tell the supervisor, and that they do nothing where there is none."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.runtime import metrics
from shoal.runtime.board import VARIABLE, Board, Place, Standing
from shoal.runtime.metrics import Line
from shoal.runtime.reporter import Reporter


class Node:
    """A supervisor's end of the board and of the metrics' line."""

    def __init__(self) -> None:
        self.fd, self.board = Board.make()
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours.settimeout(0)
        self.board.assign(0, Place(generation=0, rank=0, local_rank=0, master_port=1))

    def heard(self) -> list[tuple[int | None, dict[str, float | None]]]:
        found: list[tuple[int | None, dict[str, float | None]]] = []
        while True:
            try:
                line = msgspec.msgpack.decode(self.ours.recv(65536), type=Line)
            except BlockingIOError:
                return found
            found.append((line.step, {k: v for k, v in line.values.items() if k != "steps_per_s"}))


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    made = Node()
    monkeypatch.setenv(VARIABLE, f"{made.fd}:0")
    fd = made.theirs.fileno()
    monkeypatch.setenv(metrics.VARIABLE, f"{fd}:{os.fstat(fd).st_ino}")
    monkeypatch.setattr(metrics, "_voice", None)
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT", "SHOAL_GENERATION"):
        monkeypatch.setenv(name, "0")
    yield made
    monkeypatch.setattr(metrics, "_voice", None)
    os.close(made.fd)
    made.ours.close()
    made.theirs.close()


def test_steps_are_shown_on_the_board_by_one_that_cannot_join_another_group(node: Node) -> None:
    reporter = Reporter()
    reporter.begin()
    beat = node.board.beat(0)
    assert (beat.standing, beat.is_bound, beat.stepped_ns) == (Standing.JOINED, True, 0)
    reporter.step(41)
    reporter.step(42)
    beat = node.board.beat(0)
    assert (beat.step, beat.first_step, beat.pid) == (42, 41, os.getpid())


def test_pauses_and_the_end_are_no_hang(node: Node) -> None:
    reporter = Reporter()
    reporter.step(1)
    told = []
    for change in (reporter.pauses, reporter.goes_on, reporter.end, reporter.begin):
        change()
        told.append(node.board.beat(0).standing)
    assert told == [Standing.DONE, Standing.JOINED, Standing.DONE, Standing.JOINED]


def test_numbers_among_what_a_library_logs_are_metrics(node: Node) -> None:
    class Tensor:
        def __float__(self) -> float:
            return 2.5

    values: dict[str, Any] = {"loss": Tensor(), "epoch": 3, "note": "good", "table": [1], "lr": float("nan")}
    Reporter().log(values, 7)
    assert node.heard() == [(7, {"loss": 2.5, "epoch": 3.0, "lr": None})]


def test_checkpoint_is_noted_by_the_first_rank_alone(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    Reporter().saved(10)
    monkeypatch.setenv("RANK", "1")
    Reporter().saved(10)
    assert node.heard() == [(10, {"checkpoint_step": 10.0})]


def use_all(reporter: Reporter) -> None:
    reporter.begin()
    reporter.step(1)
    reporter.log({"loss": 1.0}, 1)
    reporter.saved(1)
    reporter.pauses()
    reporter.goes_on()
    reporter.end()


def test_outside_of_a_job_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv(metrics.VARIABLE, raising=False)
    monkeypatch.setattr(metrics, "_voice", None)
    before = dict(os.environ)
    use_all(Reporter())
    assert dict(os.environ) == before


def test_process_whose_descriptor_is_another_file_leaves_it_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rank's child may have the variable, and a file of its own where the board was."""
    path = tmp_path / "weights"
    path.write_bytes(b"x" * (1 << 17))
    monkeypatch.delenv(metrics.VARIABLE, raising=False)
    monkeypatch.setattr(metrics, "_voice", None)
    with path.open("r+b") as file:
        monkeypatch.setenv(VARIABLE, f"{file.fileno()}:0")
        use_all(Reporter())
    assert path.read_bytes() == b"x" * (1 << 17)
