"""The reports of callbacks to the supervisor. Without a supervisor they do nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.runtime import metrics
from shoal.runtime.metrics import MetricLine
from shoal.runtime.rank.board import BOARD_VARIABLE, RankAssignment, RankBoard, RankStatus
from shoal.runtime.rank.reporter import TrainingReporter


class Node:
    """The supervisor's end of the board and of the metric channel."""

    def __init__(self) -> None:
        self.fd, self.board = RankBoard.create()
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours.settimeout(0)
        self.board.assign(0, RankAssignment(rendezvous_round=0, rank=0, local_rank=0, master_port=1))

    def messages(self) -> list[tuple[int | None, dict[str, float | None]]]:
        messages: list[tuple[int | None, dict[str, float | None]]] = []
        while True:
            try:
                line = msgspec.msgpack.decode(self.ours.recv(65536), type=MetricLine)
            except BlockingIOError:
                return messages
            messages.append((line.step, {k: v for k, v in line.values.items() if k != "steps_per_s"}))


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    made = Node()
    monkeypatch.setenv(BOARD_VARIABLE, f"{made.fd}:0")
    fd = made.theirs.fileno()
    monkeypatch.setenv(metrics.METRICS_VARIABLE, f"{fd}:{os.fstat(fd).st_ino}")
    monkeypatch.setattr(metrics, "_channel", None)
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT", "SHOAL_RENDEZVOUS_ROUND"):
        monkeypatch.setenv(name, "0")
    yield made
    monkeypatch.setattr(metrics, "_channel", None)
    os.close(made.fd)
    made.ours.close()
    made.theirs.close()


def test_reporter_shows_steps_on_the_board_and_is_bound_to_its_round(node: Node) -> None:
    reporter = TrainingReporter()
    reporter.begin()
    beat = node.board.heartbeat(0)
    assert (beat.status, beat.is_bound_to_round, beat.stepped_ns) == (RankStatus.JOINED, True, 0)
    reporter.step(41)
    reporter.step(42)
    beat = node.board.heartbeat(0)
    assert (beat.step, beat.first_step, beat.pid) == (42, 41, os.getpid())


def test_pauses_and_the_end_are_no_hang(node: Node) -> None:
    reporter = TrainingReporter()
    reporter.step(1)
    reported = []
    for change in (reporter.pause, reporter.resume, reporter.end, reporter.begin):
        change()
        reported.append(node.board.heartbeat(0).status)
    assert reported == [RankStatus.DONE, RankStatus.JOINED, RankStatus.DONE, RankStatus.JOINED]


def test_numbers_among_what_a_library_logs_are_metrics(node: Node) -> None:
    class Tensor:
        def __float__(self) -> float:
            return 2.5

    values: dict[str, Any] = {"loss": Tensor(), "epoch": 3, "note": "good", "table": [1], "lr": float("nan")}
    TrainingReporter().log(values, 7)
    assert node.messages() == [(7, {"loss": 2.5, "epoch": 3.0, "lr": None})]


def test_checkpoint_is_noted_by_the_first_rank_alone(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    TrainingReporter().saved(10)
    monkeypatch.setenv("RANK", "1")
    TrainingReporter().saved(10)
    assert node.messages() == [(10, {"checkpoint_step": 10.0})]


def use_all(reporter: TrainingReporter) -> None:
    reporter.begin()
    reporter.step(1)
    reporter.log({"loss": 1.0}, 1)
    reporter.saved(1)
    reporter.pause()
    reporter.resume()
    reporter.end()


def test_reporter_outside_of_a_job_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BOARD_VARIABLE, raising=False)
    monkeypatch.delenv(metrics.METRICS_VARIABLE, raising=False)
    monkeypatch.setattr(metrics, "_channel", None)
    before = dict(os.environ)
    use_all(TrainingReporter())
    assert dict(os.environ) == before


def test_process_whose_descriptor_is_another_file_leaves_it_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A child of a rank may have the variable, and a file of its own under the board's descriptor."""
    path = tmp_path / "weights"
    path.write_bytes(b"x" * (1 << 17))
    monkeypatch.delenv(metrics.METRICS_VARIABLE, raising=False)
    monkeypatch.setattr(metrics, "_channel", None)
    with path.open("r+b") as file:
        monkeypatch.setenv(BOARD_VARIABLE, f"{file.fileno()}:0")
        use_all(TrainingReporter())
    assert path.read_bytes() == b"x" * (1 << 17)
