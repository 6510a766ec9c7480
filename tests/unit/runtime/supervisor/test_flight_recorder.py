"""The record of the last NCCL calls, requested through a pipe that PyTorch's own thread reads."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from shoal.runtime.supervisor import flight_recorder
from shoal.runtime.supervisor.environment import RendezvousRound, rank_environment
from shoal.wire import TaskCredentials
from tests.support.runtime.tasks import a_task_spec


def listening(work: Path, rank: int) -> int:
    pipe = work / f".nccl_pipe_{rank}.pipe"
    os.mkfifo(pipe)
    return os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)


def test_record_of_a_listening_rank_is_copied_beside_the_log(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    reader = listening(work, 3)
    (work / ".nccl_record_3").write_text("of another hang")
    requested = flight_recorder.request_records(str(work), [2, 3])
    assert requested == {3}
    assert os.read(reader, 10) == b"1"
    threading.Timer(0.1, lambda: (work / ".nccl_record_3").write_text("record")).start()
    kept = flight_recorder.collect_records(str(work), requested, str(tmp_path))
    assert Path(kept[3]).read_text() == "record"
    os.close(reader)


def test_rank_without_nccl_costs_no_wait(tmp_path: Path) -> None:
    assert (
        flight_recorder.collect_records(
            str(tmp_path), flight_recorder.request_records(str(tmp_path), [0]), str(tmp_path)
        )
        == {}
    )


def test_link_in_place_of_a_record_is_not_followed(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    reader = listening(work, 0)
    requested = flight_recorder.request_records(str(work), [0])
    secret = tmp_path / "secret"
    secret.write_text("of somebody else")
    (work / ".nccl_record_0").symlink_to(secret)
    assert flight_recorder.collect_records(str(work), requested, str(tmp_path)) == {}
    os.close(reader)


def test_only_ranks_with_gpus_keep_a_record_unless_the_job_overrides_it() -> None:
    def found(**changes: object) -> str | None:
        task_spec = a_task_spec(env={"A": "1"}, **changes)
        return rank_environment(
            task_spec,
            0,
            RendezvousRound(),
            work="/work",
            credentials=TaskCredentials(),
            network={},
            service={},
        ).get("TORCH_FR_BUFFER_SIZE")

    assert found() is None
    assert found(gpu_ids=(0,)) == "2000"
    assert found(gpu_ids=(0,), are_gpus_simulated=True) is None
