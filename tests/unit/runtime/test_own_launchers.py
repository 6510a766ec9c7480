"""Launchers that run in ranks though Shoal did not let them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.runtime import own_launchers
from shoal.runtime.own_launchers import OwnLaunchers

WAITS = "import sys; print('up', flush=True); sys.stdin.read()"


@contextmanager
def running(words: list[str], environment: dict[str, str], program: str) -> Iterator[subprocess.Popen[str]]:
    """A process with this command line, which has begun."""
    with subprocess.Popen(
        words, executable=program, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            yield process
        finally:
            process.kill()


def found(looks: OwnLaunchers, pid: int, num_looks: int = 2) -> str | None:
    for second in range(num_looks):
        looks.look({pid}, float(second))
    return looks.found


@pytest.mark.parametrize("name", ["mpirun", "mpiexec.hydra", "orterun", "mpirun.openmpi", "prterun"])
def test_real_mpirun_with_an_emptied_environment_is_found(name: str) -> None:
    with running([f"/usr/bin/{name}", "-c", WAITS, "-n", "4", "./hello"], {}, sys.executable) as process:
        assert found(OwnLaunchers(), process.pid, 1) == name.partition(".")[0]


@pytest.mark.parametrize("mark", ["SHOAL_LAUNCHER", "SHOAL_MPI"])
def test_mpirun_that_shoal_has_let_run_is_none(mark: str) -> None:
    with running(["mpirun", "-c", WAITS], {mark: "mpirun"}, sys.executable) as process:
        assert found(OwnLaunchers(), process.pid) is None


@pytest.mark.parametrize("words", [["mpirun"], ["mpirun", "--version"], ["./mpirun_results", "-n", "2"]])
def test_process_that_starts_no_ranks_is_none(words: list[str]) -> None:
    line = "".join(f"{word}\0" for word in words)
    assert own_launchers._launcher(0, line.encode()) is None


def test_launcher_that_a_script_becomes_late_is_found(tmp_path: Path) -> None:
    """As `python prepare_and_exec.py` does: the interpreter stays the same file."""
    (tmp_path / "torchrun").write_text(WAITS)
    late = "import os, sys; print('up', flush=True); input(); os.execv(sys.argv[1], sys.argv[1:])"
    words = [sys.executable, "-c", late, sys.executable, f"{tmp_path}/torchrun", "train.py"]
    looks = OwnLaunchers()
    with running(words, {}, sys.executable) as process:
        assert found(looks, process.pid, 100) is None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "up\n"
        assert found(looks, process.pid) == "torchrun"


def test_one_look_takes_a_part_of_very_many_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_launchers, "MAX_PROCESSES", 2)
    looks = OwnLaunchers()
    assert [looks._next({1, 2, 3, 4, 5}) for _ in range(3)] == [[1, 2], [3, 4], [5, 1]]
    assert looks._next({1, 2}) == [2, 1]
    assert looks._next({1, 2}) == [1, 2]
