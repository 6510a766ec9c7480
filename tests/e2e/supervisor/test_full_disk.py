"""A full disk stops no rank, and the outcome waits for room."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.runtime.files import spool
from shoal.wire import EndKind
from tests.support.runtime.tasks import RunningTask, a_task_spec, pids_with, until

SIZE = 2 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small disk takes root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(path: Path) -> None:
    """Take every page that is left."""
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)


@pytest.mark.serial
def test_full_disk_loses_lines_but_neither_the_ranks_nor_the_outcome(small_disk: Path) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * (SIZE // 2))
    task = RunningTask(small_disk / "home", a_task_spec(run="seq -f 'line %.0f' 150000; exec sleep 2.25"))
    process = task.spawn()
    until(lambda: bool(pids_with("sleep\0002.25")) or process.poll() is not None, 30)
    with contextlib.ExitStack() as kept:
        # An open file keeps its room when it is removed, as a job's stand-ins do at its end.
        for path in (small_disk / "home").rglob("*"):
            if path.is_file():
                kept.enter_context(path.open("rb"))
        fill(small_disk / "rest")
        until(lambda: not pids_with("sleep\0002.25"), 30)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)  # it has ended, but there is no room for the outcome
        assert spool.read_outcome(task.task) is None
        filler.unlink()
    outcome = task.outcome()
    process.wait(20)
    assert outcome.kind is EndKind.SUCCEEDED
    num_lost = sum(int(text.split()[0]) for text in task.texts("e") if "lines were lost" in text)
    numbers = [int(text.split()[1]) for text in task.texts("o")]
    assert numbers == sorted(numbers)
    assert num_lost + len(numbers) == 150_000
    task.close()


@pytest.mark.serial
def test_lost_lines_are_noted_when_the_disk_has_room_again(small_disk: Path) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * (SIZE // 2))
    run = "seq -f 'line %.0f' 150000; while [ ! -e go ]; do sleep 0.05; done; echo room"
    task = RunningTask(small_disk / "home", a_task_spec(run=run, confinement=()))
    task.spawn()
    until(lambda: len(task.log()) > 1000, 30, task.describe)
    sizes: list[int] = []

    def has_stopped_growing() -> bool:
        sizes.append(Path(task.task.log).stat().st_size)
        return len(sizes) > 20 and sizes[-1] == sizes[-20]

    until(has_stopped_growing, 30, task.describe)
    filler.unlink()
    (task.directory / "work" / "go").touch()
    assert task.outcome().kind is EndKind.SUCCEEDED
    assert "lines were lost here" in task.texts("e")[-1]
    assert task.texts("o")[-1] == "room"
    task.close()
