"""The record of the last NCCL calls, asked for through a pipe as PyTorch's own thread reads it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from shoal.runtime import flight_recorder
from shoal.runtime.environment import Generation, rank_environment
from shoal.wire import Credentials
from tests.support.shares import an_order


def listening(work: Path, rank: int) -> int:
    pipe = work / f".nccl_pipe_{rank}.pipe"
    os.mkfifo(pipe)
    return os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)


def test_record_of_a_rank_that_listens_is_kept_beside_the_log(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    reader = listening(work, 3)
    (work / ".nccl_record_3").write_text("of another hang")
    asked = flight_recorder.ask(str(work), [2, 3])
    assert asked == {3}
    assert os.read(reader, 10) == b"1"
    threading.Timer(0.1, lambda: (work / ".nccl_record_3").write_text("record")).start()
    kept = flight_recorder.keep(str(work), asked, str(tmp_path))
    assert Path(kept[3]).read_text() == "record"
    os.close(reader)


def test_rank_without_nccl_is_not_waited_for(tmp_path: Path) -> None:
    assert flight_recorder.keep(str(tmp_path), flight_recorder.ask(str(tmp_path), [0]), str(tmp_path)) == {}


def test_link_in_the_place_of_a_record_is_not_followed(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    reader = listening(work, 0)
    asked = flight_recorder.ask(str(work), [0])
    secret = tmp_path / "secret"
    secret.write_text("of somebody else")
    (work / ".nccl_record_0").symlink_to(secret)
    assert flight_recorder.keep(str(work), asked, str(tmp_path)) == {}
    os.close(reader)


def test_only_ranks_with_gpus_keep_one_and_the_job_may_say_otherwise() -> None:
    def found(**changes: object) -> str | None:
        order = an_order(env={"A": "1"}, **changes)
        return rank_environment(
            order, 0, Generation(), work="/work", credentials=Credentials(), network={}, service={}
        ).get("TORCH_FR_BUFFER_SIZE")

    assert found() is None
    assert found(gpu_ids=(0,)) == "2000"
    assert found(gpu_ids=(0,), are_gpus_simulated=True) is None
