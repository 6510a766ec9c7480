"""Launchers that run inside ranks without Shoal's consent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.runtime.supervisor import world_check
from shoal.runtime.supervisor.world_check import UnknownLaunchers

WAITS = "import sys; print('up', flush=True); sys.stdin.read()"


@contextmanager
def running(command: list[str], environment: dict[str, str], program: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process with this command line, and wait until it runs."""
    with subprocess.Popen(
        command, executable=program, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            yield process
        finally:
            process.kill()


def launcher_in(looks: UnknownLaunchers, pid: int, num_looks: int = 2) -> str | None:
    for second in range(num_looks):
        looks.check({pid}, float(second))
    return looks.launcher_name


@pytest.mark.parametrize("name", ["mpirun", "mpiexec.hydra", "orterun", "mpirun.openmpi", "prterun"])
def test_real_mpirun_with_an_emptied_environment_is_found(name: str) -> None:
    with running([f"/usr/bin/{name}", "-c", WAITS, "-n", "4", "./hello"], {}, sys.executable) as process:
        assert launcher_in(UnknownLaunchers(), process.pid, 1) == name.partition(".")[0]


@pytest.mark.parametrize(
    ("mark", "name"), [("SHOAL_LAUNCHER", "mpirun"), ("SHOAL_MPI", None)], ids=["of a script", "of the job"]
)
def test_only_the_mpirun_of_the_jobs_own_world_is_not_reported(mark: str, name: str | None) -> None:
    with running(["mpirun", "-c", WAITS], {mark: "mpirun"}, sys.executable) as process:
        assert launcher_in(UnknownLaunchers(), process.pid) == name


def test_launcher_that_shoal_lets_run_is_not_reported(tmp_path: Path) -> None:
    (tmp_path / "torchrun").write_text(WAITS)
    command = [sys.executable, f"{tmp_path}/torchrun", "train.py"]
    with running(command, {"SHOAL_LAUNCHER": "torchrun"}, sys.executable) as process:
        assert launcher_in(UnknownLaunchers(), process.pid) is None


@pytest.mark.parametrize("command", [["mpirun"], ["mpirun", "--version"], ["./mpirun_results", "-n", "2"]])
def test_process_that_starts_no_ranks_is_not_reported(command: list[str]) -> None:
    line = "".join(f"{word}\0" for word in command)
    assert world_check._launcher(0, line.encode()) is None


def test_script_that_becomes_a_launcher_late_is_found(tmp_path: Path) -> None:
    """As `python prepare_and_exec.py` does: the interpreter stays the same file."""
    (tmp_path / "torchrun").write_text(WAITS)
    late = "import os, sys; print('up', flush=True); input(); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", late, sys.executable, f"{tmp_path}/torchrun", "train.py"]
    looks = UnknownLaunchers()
    with running(command, {}, sys.executable) as process:
        assert launcher_in(looks, process.pid, 100) is None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "up\n"
        assert launcher_in(looks, process.pid) == "torchrun"


def test_one_check_reads_only_some_of_very_many_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_check, "MAX_PROCESSES", 2)
    looks = UnknownLaunchers()
    assert [looks._next({1, 2, 3, 4, 5}) for _ in range(3)] == [[1, 2], [3, 4], [5, 1]]
    assert looks._next({1, 2}) == [2, 1]
    assert looks._next({1, 2}) == [1, 2]
