"""Ranks that are asked to stop at different steps save after the same step, and no rank waits for ever."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from torch.distributed import distributed_c10d

from shoal.runtime.rank.board import StopRequest
from shoal.runtime.rank.graceful_stop import EXIT_SAVED, GracefulStop
from shoal.runtime.rank.membership import RankMembership
from tests.support.runtime.tasks import SOURCE, until

PROGRAM = """
import os, signal, sys, time
import torch
from shoal import runtime
if sys.argv[1] == "own":
    signal.signal(signal.SIGTERM, lambda *_: (print("own way", flush=True), os._exit(3)))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

def program(run):
    print("begins", run.step, flush=True)
    for step in run.steps(1000000):
        gradient = model(torch.ones(2, 4)).sum()
        gradient.backward()
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
        optimizer.step()
        time.sleep(float(sys.argv[2]))
        print("step", step + 1, flush=True)

saved = runtime.Checkpoints("saved", every=1000000)
runtime.train(program, {"model": model, "optimizer": optimizer}, checkpoints=saved, backend="gloo")
"""


class Ranks:
    """Three ranks outside of Shoal."""

    def __init__(self, folder: Path, how: str = "save", pause_s: str = "0.01") -> None:
        self.folder = folder
        (folder / "train.py").write_text(PROGRAM)
        port = str(31_000 + os.getpid() % 1_000)
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "3", "OMP_NUM_THREADS": "1"}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
        self.processes = []
        for rank in range(3):
            env = {**kept, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": SOURCE}
            command = [sys.executable, "train.py", how, pause_s]
            with (folder / f"out.{rank}").open("ab") as out:
                started = subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=out)
            self.processes.append(started)

    def said(self, rank: int) -> str:
        return (self.folder / f"out.{rank}").read_text()

    def steps(self, rank: int) -> list[int]:
        return [int(step) for step in re.findall(r"step (\d+)", self.said(rank))]

    def until_step(self, step: int) -> None:
        until(lambda: all(step in self.steps(rank) for rank in range(3)), 60, lambda: self.said(0))

    def ends(self) -> list[int]:
        return [process.wait(60) for process in self.processes]


@pytest.mark.soak
@pytest.mark.parametrize("pause_s", ["0.05", "0"])
def test_ranks_that_get_sigterm_at_different_times_save_after_the_same_step(
    tmp_path: Path, pause_s: str
) -> None:
    ranks = Ranks(tmp_path, pause_s=pause_s)
    ranks.until_step(10)
    for process in ranks.processes:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)  # a rank that stopped by itself would leave its peers in a collective
    assert ranks.ends() == [EXIT_SAVED] * 3, ranks.said(0)
    (last,) = {ranks.steps(rank)[-1] for rank in range(3)}
    again = Ranks(tmp_path)
    until(lambda: f"begins {last}" in again.said(0), 60, lambda: again.said(0))
    for process in again.processes:
        process.kill()
        process.wait()


class Supervised(RankMembership):
    """A membership whose supervisor has asked all ranks to save."""

    has_supervisor, request = True, StopRequest.SAVE


@pytest.mark.parametrize(("is_asked", "goes"), [(True, True), (False, False)])
def test_rank_that_was_asked_to_stop_goes_when_its_group_breaks_and_waits_for_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_asked: bool, goes: bool
) -> None:
    farewell = GracefulStop(Supervised())
    gone: list[bool] = []
    monkeypatch.setattr(farewell, "_terminate", lambda: gone.append(True))
    farewell._is_requested = is_asked
    farewell.give_up(RuntimeError("connection closed by peer"))
    assert gone == [True] * goes
    message = capsys.readouterr().err
    assert ("RuntimeError: connection closed by peer" in message) == goes
    assert message.startswith("shoal: asked to stop") == goes


class Untold(RankMembership):
    """A membership whose supervisor answers after some polls, or never."""

    def __init__(self, word: StopRequest, looks: int) -> None:
        super().__init__()
        self._word, self._looks = word, looks

    @property
    def request(self) -> StopRequest:
        self._looks -= 1
        return StopRequest.UNKNOWN if self._looks >= 0 else self._word


@pytest.mark.parametrize(
    ("word", "looks", "does"),
    [
        (StopRequest.SAVE, 0, "agrees"),
        (StopRequest.SAVE, 9, "agrees"),
        (StopRequest.EXIT, 9, "goes"),
        (StopRequest.UNKNOWN, 0, "goes"),
    ],
)
def test_rank_that_gets_its_signal_before_its_supervisor_waits_for_the_word(
    monkeypatch: pytest.MonkeyPatch, word: StopRequest, looks: int, does: str
) -> None:
    done = list[str]()
    farewell: Any = GracefulStop(Untold(word, looks))
    monkeypatch.setattr(distributed_c10d, "_get_default_store", Mock())
    monkeypatch.setattr(farewell, "_agree", lambda *_: done.append("agrees"))
    monkeypatch.setattr(os, "kill", lambda *_: done.append("goes"))
    monkeypatch.setattr(farewell, "_begin", lambda: farewell._run(Mock()))
    farewell._group = Mock()
    farewell._on_signal(signal.SIGTERM, None)
    assert (done, farewell._is_alone) == ([does], does == "goes")


def test_program_with_a_handler_of_its_own_is_left_alone(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, "own")
    ranks.until_step(2)
    for process in ranks.processes:
        process.send_signal(signal.SIGTERM)
    assert ranks.ends().count(3) >= 1
    assert "own way" in "".join(ranks.said(rank) for rank in range(3))
    assert not list((tmp_path / "saved").glob("step*"))
