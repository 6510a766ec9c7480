"""A launcher's stand-in knows its rank, whatever a script does with the variables before."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.runtime.warm import install, launchers, rank_identity

RANK = {
    "SHOAL_RANK": "1",
    "SHOAL_LOCAL_RANK": "1",
    "SHOAL_WORLD_SIZE": "4",
    "SHOAL_RANKS_PER_NODE": "2",
    "SHOAL_NUM_NODES": "2",
    "SHOAL_NODE_RANK": "0",
    "SHOAL_RENDEZVOUS_ROUND": "0",
    "SHOAL_BOARD": "9:0",
    "SHOAL_MASTER_ADDR": "10.0.0.1",
    "SHOAL_MASTER_PORT": "30001",
    "SHOAL_ATTEMPT_ID": "att_1",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "SLURM_PROCID": "1",
}
ALONE = {
    "SHOAL_RANK": "0",
    "SHOAL_LOCAL_RANK": "0",
    "SHOAL_WORLD_SIZE": "1",
    "SHOAL_RANKS_PER_NODE": "1",
    "SHOAL_NUM_NODES": "1",
    "SHOAL_NODE_RANK": "0",
}
REAL = '#!/bin/sh\necho "real ${0##*/} $*"\n'
PROGRAM = """
import os
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT".split()
print(*(os.environ.get(name) for name in names))
"""
Shell = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """Runs a line of a rank's script, where `mpirun`, `srun` and torchrun's module print their command."""
    module = tmp_path / "own" / "torch" / "distributed" / "run.py"
    module.parent.mkdir(parents=True)
    for package in (module.parent, module.parent.parent):
        (package / "__init__.py").touch()
    module.write_text("import sys; print('real torchrun', *sys.argv[1:])\n")
    for name in ("mpirun", "srun"):
        script = tmp_path / "real" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(REAL)
        script.chmod(0o755)
    path = f"{tmp_path}/real:{Path(sys.executable).parent}:/usr/bin:/bin"
    install.install(str(tmp_path), path, None)
    (tmp_path / "train.py").write_text(PROGRAM)

    def run(line: str, environment: dict[str, str] = RANK) -> subprocess.CompletedProcess[str]:
        paths = {"PATH": f"{tmp_path}/bin:{path}", "PYTHONPATH": f"{tmp_path}/hook:{tmp_path}/own"}
        return subprocess.run(
            ["/bin/bash", "-c", line],
            cwd=tmp_path,
            env={**environment, **paths, "BASH_ENV": f"{tmp_path}/bash_env"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def reports(folder: Path) -> str:
    return (folder / launchers.WORLDS).read_text()


CHANGED = {
    "export WORLD_SIZE=1; mpirun -n 4 ./hello": "finds `WORLD_SIZE=1`, and in this rank of the job it is 4",
    "export LOCAL_RANK=0; mpirun -n 4 ./hello": "finds `LOCAL_RANK=0`",
    "export SHOAL_WORLD_SIZE=1; mpirun -n 4 ./hello": "finds 1 ranks in SHOAL_WORLD_SIZE",
    "unset RANK WORLD_SIZE LOCAL_RANK; mpirun -n 2 ./hello": "asks for 2 processes, and the job has 4",
}


@pytest.mark.parametrize("line", CHANGED)
def test_mpirun_of_a_rank_whose_variables_were_changed_starts_no_world_of_its_own(
    shell: Shell, tmp_path: Path, line: str
) -> None:
    done = shell(f"{line} | cat")
    assert (done.returncode, done.stdout) == (0, "")
    assert CHANGED[line] in done.stderr
    assert reports(tmp_path) == f"1 0 1 0 0.0 {launchers.REFUSED}\n"


@pytest.mark.parametrize(
    "launcher",
    ["mpirun -n 4 ./hello", "torchrun --nproc-per-node 2 train.py", "srun python train.py"],
)
@pytest.mark.parametrize("lost", ["unset ${!SHOAL_@} RANK WORLD_SIZE; ", 'env -i PATH="$PATH" '])
def test_launcher_in_a_rank_that_has_lost_its_variables_is_refused_and_reported(
    shell: Shell, tmp_path: Path, lost: str, launcher: str
) -> None:
    done = shell(f"{lost}{launcher} | cat")
    assert done.stdout == ""
    assert "does not know its rank: the script has removed SHOAL_WORLD_SIZE" in done.stderr
    assert reports(tmp_path) == f"-1 -1 1 0 0.0 {launchers.REFUSED}\n"


@pytest.mark.parametrize("before", ["unset RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR", "export WORLD_SIZE=1"])
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate launch", "deepspeed --no_local_rank"])
def test_program_behind_a_launcher_finds_the_numbers_that_the_script_has_removed(
    shell: Shell, before: str, launcher: str
) -> None:
    done = shell(f"{before}; {launcher} train.py")
    assert done.stdout == "1 1 4 2 0 10.0.0.1 30001\n", done.stderr


def test_step_of_srun_finds_the_number_that_the_script_has_removed(shell: Shell) -> None:
    assert shell("unset SLURM_PROCID; srun sh -c 'echo $SLURM_PROCID of $SLURM_NTASKS'").stdout == "1 of 4\n"


def test_spare_gets_no_number_from_its_launcher(shell: Shell) -> None:
    variables = {name: value for name, value in RANK.items() if not name.endswith("RANK")}
    assert shell("torchrun train.py", variables | {"SHOAL_NODE_RANK": "0"}).stdout.startswith("None None 4 2")


def test_only_rank_gets_the_variables_of_the_real_launcher() -> None:
    meets = {"SHOAL_MASTER_ADDR": "10.0.0.1", "SHOAL_MASTER_PORT": "30001", "SHOAL_ATTEMPT_ID": "att_1"}
    variables = rank_identity.launcher_variables("torchrun", {**ALONE, **meets})
    assert (variables["RANK"], variables["WORLD_SIZE"], variables["LOCAL_RANK"]) == ("0", "1", "0")
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("10.0.0.1", "30001")
    assert variables["TORCHELASTIC_RUN_ID"] == "att_1"
    assert rank_identity.launcher_variables("accelerate-launch", ALONE) == {}


def test_only_rank_of_a_job_starts_a_world_with_the_real_mpirun(shell: Shell) -> None:
    assert shell("WORLD_SIZE=7 mpirun -n 4 ./hello", ALONE).stdout == "real mpirun -n 4 ./hello\n"


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        ("mpirun --version", "real mpirun --version\n"),
        ("mpirun -np 4 -V ./hello", "real mpirun -V\n"),
        ("mpirun --help mapping", "real mpirun --help\n"),
        ("srun --version", "real srun --version\n"),
        ("srun -V", "real srun -V\n"),
        ("srun -N 1 --mpi=list", "real srun --mpi=list\n"),
        ("srun --cpu-bind help ./hello", "real srun --cpu-bind=help\n"),
        ("torchrun --version", "real torchrun --version\n"),
        ("torchrun --help", "real torchrun --help\n"),
    ],
)
@pytest.mark.parametrize("environment", [RANK, ALONE])
def test_launcher_that_is_asked_about_itself_is_the_real_one_and_no_failure(
    shell: Shell, tmp_path: Path, line: str, printed: str, environment: dict[str, str]
) -> None:
    assert shell(line, environment).stdout == printed
    assert reports(tmp_path) == ""


@pytest.mark.parametrize("line", ["mpirun --version", "srun --version"])
def test_question_about_a_launcher_that_is_not_installed_is_no_refusal(
    shell: Shell, tmp_path: Path, line: str
) -> None:
    (tmp_path / "real" / "mpirun").unlink()
    (tmp_path / "real" / "srun").unlink()
    done = shell(f"PATH={tmp_path}/bin:{tmp_path}/real; {line}")
    assert done.returncode == 127, done.stderr
    assert reports(tmp_path) == ""
