"""Two launchers that one rank starts at the same time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from shoal.runtime.warm import install, names

RANK = {
    "SHOAL_RANK": "1",
    "SHOAL_LOCAL_RANK": "1",
    "SHOAL_WORLD_SIZE": "2",
    "SHOAL_RANKS_PER_NODE": "2",
    "SHOAL_NUM_NODES": "1",
    "SHOAL_NODE_RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
}
WAITS = "import pathlib, sys, time\npathlib.Path(sys.argv[1]).touch()\ntime.sleep(60)\n"


@pytest.fixture
def rank(tmp_path: Path) -> dict[str, str]:
    """The variables of a rank with its stand-ins installed below `tmp_path`."""
    install.install(str(tmp_path), os.environ["PATH"], None)
    (tmp_path / "waits.py").write_text(WAITS)
    (tmp_path / "says.py").write_text("print('ran', flush=True)\n")
    return {**os.environ, **RANK, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}


def run(rank: dict[str, str], folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """What a rank's script does, in a session of its own as every rank has it."""
    command = ["bash", "-c", script]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=rank,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


UNTIL_FIRST = "torchrun waits.py begun & first=$!; until [ -e begun ]; do sleep 0.01; done; "


def test_second_launcher_at_the_same_time_is_refused_and_told(rank: dict[str, str], tmp_path: Path) -> None:
    done = run(rank, tmp_path, UNTIL_FIRST + "torchrun says.py; code=$?; kill $first; wait; exit $code")
    assert done.returncode == 2
    assert "another launcher of this rank is still running" in done.stderr
    assert "submit each as a job of its own" in done.stderr
    assert done.stdout == ""
    assert (tmp_path / names.WORLDS).read_text() == f"1 0 1 0 0.0 {names.SECOND}\n"


def test_launchers_one_after_the_other_run(rank: dict[str, str], tmp_path: Path) -> None:
    done = run(rank, tmp_path, UNTIL_FIRST + "kill -9 $first; wait; torchrun says.py && torchrun says.py")
    assert (done.returncode, done.stdout) == (0, "ran\nran\n"), done.stderr
    assert (tmp_path / names.WORLDS).read_text() == ""


def test_launcher_that_the_program_behind_one_starts_runs(rank: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "drives.py").write_text(
        "import subprocess\nsubprocess.run(['torchrun', 'says.py'], check=True)\n"
    )
    done = run(rank, tmp_path, "torchrun drives.py")
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


def test_spare_process_of_the_same_rank_runs_beside_it(rank: dict[str, str], tmp_path: Path) -> None:
    first = subprocess.Popen(
        ["bash", "-c", "exec torchrun waits.py begun"], cwd=tmp_path, env=rank, start_new_session=True
    )
    try:
        while not (tmp_path / "begun").exists():
            assert first.poll() is None
            time.sleep(0.01)
        done = run(rank, tmp_path, "torchrun says.py")
        assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    finally:
        first.kill()
        first.wait()


@pytest.mark.parametrize(
    "command",
    ["torchrun --nproc-per-node 3 says.py", "srun -n 3 python says.py", "mpirun -n 3 python says.py"],
)
def test_refused_launcher_is_told_though_a_pipe_hides_its_end(
    rank: dict[str, str], tmp_path: Path, command: str
) -> None:
    done = run(rank, tmp_path, f"{command} | cat")
    assert done.returncode == 0
    assert "hint: " in done.stderr
    assert (tmp_path / names.WORLDS).read_text() == f"1 0 1 0 0.0 {names.REFUSED}\n"
