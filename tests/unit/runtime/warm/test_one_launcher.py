"""One rank runs one launcher, and one member of the job's process group, at a time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.engines.fake import VirtualClock
from shoal.runtime.supervisor.unfinished_launchers import rank_with_unfinished_launcher
from shoal.runtime.warm import install, launchers
from shoal.runtime.warm.launcher_lock import BEHIND_LAUNCHER, LauncherClaim

RANK = {
    "SHOAL_RANK": "1",
    "SHOAL_LOCAL_RANK": "1",
    "SHOAL_WORLD_SIZE": "2",
    "SHOAL_RANKS_PER_NODE": "2",
    "SHOAL_NUM_NODES": "1",
    "SHOAL_NODE_RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "SHOAL_BOARD": "9:0",
}
TORCH = """
world = None
def init_process_group(backend, init_method=None, timeout=None, world_size=2, rank=1, store=None):
    global world
    assert world is None, "default group twice"
    world = world_size, rank
def destroy_process_group(group=None):
    global world
    world = None
def is_initialized(): return world is not None
def get_world_size(): return world[0]
def get_rank(): return world[1]
"""
WAITS = "import pathlib, sys, time\npathlib.Path(sys.argv[1]).touch()\ntime.sleep(60)\n"


@pytest.fixture
def rank(tmp_path: Path) -> dict[str, str]:
    """The environment of a rank whose stand-ins are installed below `tmp_path`."""
    install.install(str(tmp_path), os.environ["PATH"], None)
    (tmp_path / "waits.py").write_text(WAITS)
    (tmp_path / "says.py").write_text("print('ran', flush=True)\n")
    return {**os.environ, **RANK, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}


def run(rank: dict[str, str], folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a rank's script in a session of its own, as every rank has it."""
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


def test_second_launcher_at_the_same_time_is_refused_and_reported(
    rank: dict[str, str], tmp_path: Path
) -> None:
    done = run(rank, tmp_path, UNTIL_FIRST + "torchrun says.py; code=$?; kill $first; wait; exit $code")
    assert done.returncode == 2
    assert "another launcher of this rank is still running" in done.stderr
    assert "submit each as a job of its own" in done.stderr
    assert done.stdout == ""
    assert (tmp_path / launchers.WORLDS).read_text() == f"1 0 1 0 0.0 {launchers.SECOND}\n"


def test_launchers_one_after_the_other_run(rank: dict[str, str], tmp_path: Path) -> None:
    done = run(rank, tmp_path, UNTIL_FIRST + "kill -9 $first; wait; torchrun says.py && torchrun says.py")
    assert (done.returncode, done.stdout) == (0, "ran\nran\n"), done.stderr
    assert (tmp_path / launchers.WORLDS).read_text() == ""


def test_launcher_that_the_program_behind_one_starts_runs(rank: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "drives.py").write_text(
        "import subprocess\nsubprocess.run(['torchrun', 'says.py'], check=True)\n"
    )
    done = run(rank, tmp_path, "torchrun drives.py")
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


def test_second_launcher_in_a_session_of_its_own_is_refused(rank: dict[str, str], tmp_path: Path) -> None:
    done = run(rank, tmp_path, UNTIL_FIRST + "setsid -w torchrun says.py; code=$?; kill $first; exit $code")
    assert (done.returncode, done.stdout) == (2, "")


def test_spare_process_of_a_rank_runs_beside_it(rank: dict[str, str], tmp_path: Path) -> None:
    spare = "env -u SHOAL_RANK -u SHOAL_LOCAL_RANK torchrun says.py"
    done = run(rank, tmp_path, UNTIL_FIRST + f"{spare}; code=$?; kill $first; exit $code")
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


def test_launcher_of_the_group_before_may_take_its_time_to_end(rank: dict[str, str], tmp_path: Path) -> None:
    after = "SHOAL_RENDEZVOUS_ROUND=1 torchrun says.py; code=$?; kill $first; exit $code"
    done = run(rank, tmp_path, UNTIL_FIRST + after)
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


SLOW_MODULES = ("torch/distributed/run.py", "accelerate/commands/launch.py")
IS_ASKED = "import pathlib, time\npathlib.Path('asked').touch()\ntime.sleep(60)\n"


@pytest.mark.parametrize(
    "launcher", ["torchrun --no-such-option=3", "accelerate launch --mixed_precision bf16"]
)
def test_launcher_holds_its_lock_while_it_asks_the_real_one_for_its_options(
    rank: dict[str, str], tmp_path: Path, launcher: str
) -> None:
    for name in SLOW_MODULES:
        module = tmp_path / "own" / name
        module.parent.mkdir(parents=True)
        for package in (module.parent, module.parent.parent):
            (package / "__init__.py").touch()
        module.write_text(IS_ASKED)
    first = f"{launcher} says.py & first=$!; until [ -e asked ]; do sleep 0.01; done; "
    second = "torchrun says.py; code=$?; kill $first; exit $code"
    done = run({**rank, "PYTHONPATH": f"{tmp_path}/own"}, tmp_path, first + second)
    assert (done.returncode, done.stdout) == (2, "")
    assert "another launcher of this rank is still running" in done.stderr


@pytest.mark.parametrize("refused", ["torchrun --nproc-per-node 3 says.py", "torchrun no_such_file.py"])
def test_refused_launcher_lets_the_next_one_run(rank: dict[str, str], tmp_path: Path, refused: str) -> None:
    done = run(rank, tmp_path, f"{refused} | cat; torchrun says.py")
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


@pytest.fixture
def holder(rank: dict[str, str], tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher of the same rank, which runs until the test kills it."""
    process = subprocess.Popen(["torchrun", "waits.py", "begun"], cwd=tmp_path, env=rank)
    try:
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.wait()


def test_claim_of_a_second_launcher_is_refused_when_it_is_settled(
    holder: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    claim = LauncherClaim(str(tmp_path), RANK)
    claim.settle(is_real=True)
    with pytest.raises(launchers.LauncherRefused, match="another launcher of this rank"):
        claim.settle(is_real=False)
    LauncherClaim(str(tmp_path), {**RANK, "SHOAL_WORLD_SIZE": "1"}).settle(is_real=False)


def test_claim_stands_if_the_first_launcher_has_ended_before_it_is_settled(
    holder: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BEHIND_LAUNCHER, "")
    claim = LauncherClaim(str(tmp_path), RANK)
    holder.kill()
    holder.wait()
    claim.settle(is_real=False)
    assert os.environ[BEHIND_LAUNCHER] == "1"


def test_steps_of_srun_run_side_by_side_and_start_launchers(rank: dict[str, str], tmp_path: Path) -> None:
    first = "srun python waits.py begun & first=$!; until [ -e begun ]; do sleep 0.01; done; "
    second = "srun bash -c 'torchrun says.py; true'; code=$?; kill $first; exit $code"
    done = run(rank, tmp_path, first + second)
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


@pytest.mark.parametrize(
    ("step", "held_by"),
    [
        ("srun", 1),
        ("srun --overlap", None),
        ("srun -n 1", None),
        ("SHOAL_WORLD_SIZE=1 SHOAL_RANKS_PER_NODE=1 srun -n 1", 1),
    ],
)
def test_step_that_is_no_helper_counts_as_an_unfinished_launcher(
    rank: dict[str, str], tmp_path: Path, step: str, held_by: int | None
) -> None:
    clock = VirtualClock()
    process = subprocess.Popen(["bash", "-c", f"{step} python waits.py begun"], cwd=tmp_path, env=rank)
    try:
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        assert rank_with_unfinished_launcher(str(tmp_path), 0, clock, clock.advance) == held_by
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "command",
    ["torchrun --nproc-per-node 3 says.py", "srun -n 3 python says.py", "mpirun -n 3 python says.py"],
)
def test_refused_launcher_is_reported_although_a_pipe_hides_its_exit_code(
    rank: dict[str, str], tmp_path: Path, command: str
) -> None:
    done = run(rank, tmp_path, f"{command} | cat")
    assert done.returncode == 0
    assert "hint: " in done.stderr
    assert (tmp_path / launchers.WORLDS).read_text() == f"1 0 1 0 0.0 {launchers.REFUSED}\n"


MEMBER = """
import os, pathlib, subprocess, sys, time
import torch.distributed.distributed_c10d as c10d
{before}
{form}
{after}
print("in", flush=True)
"""
FORM = "c10d.init_process_group('gloo', **GIVEN)"
LEAVE = "c10d.destroy_process_group()"
FIRST = "python first.py & first=$!; until [ -e begun ]; do sleep 0.01; done; "
WAITS_FOR = "pathlib.Path('begun').touch(); time.sleep(60)"
THEN = "python second.py; code=$?; kill $first; exit $code"


def run_members(
    rank: dict[str, str],
    folder: Path,
    *,
    first: str = WAITS_FOR,
    second: str = FORM,
    then: str = THEN,
    given: str = "{}",
) -> subprocess.CompletedProcess[str]:
    """Let a process of the rank join a group of a fake torch and run `first`, then start another process."""
    package = folder / "own" / "torch" / "distributed"
    package.mkdir(parents=True)
    for name in (package / "__init__.py", package.parent / "__init__.py"):
        name.touch()
    (package / "distributed_c10d.py").write_text(TORCH)
    (folder / "first.py").write_text(MEMBER.format(before="GIVEN = {}", form=FORM, after=first))
    (folder / "second.py").write_text(MEMBER.format(before=f"GIVEN = {given}", form=second, after=""))
    variables = {
        **rank,
        "RANK": "1",
        "MASTER_PORT": "29500",
        "SHOAL_MASTER_PORT": "29500",
        "PYTHONPATH": f"{folder}/hook:{folder}/own",
    }
    return run(variables, folder, FIRST + then)


def test_second_program_in_the_jobs_process_group_is_refused_and_reported(
    rank: dict[str, str], tmp_path: Path
) -> None:
    done = run_members(rank, tmp_path)
    assert done.returncode == 1
    assert "RuntimeError: another process of rank 1 is in the job's process group" in done.stderr
    assert "submit each as a job of its own" in done.stderr
    assert done.stdout == ""
    reports = (tmp_path / launchers.WORLDS).read_text().splitlines()
    assert reports == ["1 0 2 1 0.1 torch", f"1 0 1 0 0.0 {launchers.SECOND}"]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"given": "dict(init_method='tcp://127.0.0.1:29777', rank=1)"}, id="another port"),
        pytest.param({"given": "dict(init_method='file:///tmp/x', rank=0, world_size=1)"}, id="a file"),
        pytest.param({"given": "dict(rank=0, world_size=1)"}, id="another number"),
        pytest.param({"given": "dict(store=object(), rank=1)"}, id="a store of its own"),
        pytest.param(
            {"second": "os.environ['MASTER_PORT'] = '29778'; " + FORM}, id="as checkpoints are written"
        ),
        pytest.param({"first": f"{LEAVE}; {WAITS_FOR}"}, id="after the first has left"),
        pytest.param(
            {"first": f"{LEAVE}; {FORM}; {LEAVE}; {WAITS_FOR}"},
            id="again and again",
        ),
        pytest.param({"then": f"kill -9 $first; wait; {THEN}"}, id="after the first has ended"),
        pytest.param({"then": f"SHOAL_RENDEZVOUS_ROUND=1 {THEN}"}, id="after a restart in place"),
        pytest.param({"then": f"env -u SHOAL_RANK {THEN}"}, id="a spare"),
        pytest.param(
            {"then": f"rm -r lib; {THEN.replace('python', sys.executable)}"}, id="the folder is gone"
        ),
    ],
)
def test_other_groups_and_successive_groups_are_allowed(
    rank: dict[str, str], tmp_path: Path, changes: dict[str, str]
) -> None:
    done = run_members(rank, tmp_path, **changes)
    assert (done.returncode, done.stdout) == (0, "in\n"), done.stderr
    assert launchers.SECOND not in (tmp_path / launchers.WORLDS).read_text()
