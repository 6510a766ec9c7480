"""The start hook in the Python processes of a rank, with a fake torch that loads at once."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.runtime.warm import install, launchers

TORCH = """
world = None
def init_process_group(backend, world_size=1, rank=0):
    "Form a group."
    global world
    world = world_size, rank
def destroy_process_group(group=None):
    global world
    world = None
def is_initialized(): return world is not None
def get_world_size(): return world[0]
def get_rank(): return world[1]
"""
RPC = """
from types import SimpleNamespace
def init_rpc(name, rank, world_size):
    info = SimpleNamespace(id=rank)
    agent = SimpleNamespace(get_worker_infos=lambda: [info] * world_size, get_worker_info=lambda: info)
    api._get_current_rpc_agent = lambda: agent
api = SimpleNamespace()
"""
JAX = """
class State:
    def initialize(self, num_processes, process_id):
        self.num_processes, self.process_id = num_processes, process_id
"""
RANK = {
    "SHOAL_RANK": "3",
    "SHOAL_LOCAL_RANK": "1",
    "SHOAL_WORLD_SIZE": "4",
    "SHOAL_RANKS_PER_NODE": "2",
    "SHOAL_NUM_NODES": "2",
}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The work directory of a rank, with packages of its own on `PYTHONPATH`."""
    work = tmp_path / "it's work"
    work.mkdir()
    monkeypatch.chdir(work)
    for name, text in (
        ("torch/distributed/distributed_c10d", TORCH),
        ("torch/distributed/rpc", RPC),
        ("jax/_src/distributed", JAX),
    ):
        file = tmp_path / "own" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        for package in (file.parent, file.parent.parent):
            (package / "__init__.py").touch()
    for name, module in (("torchrun", "real torchrun"), ("accelerate", "real accelerate")):
        script = tmp_path / "env" / "bin" / name
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(f"#!{sys.executable}\nimport sys; print({module!r}, *sys.argv[1:])\n")
        script.chmod(0o755)
    (work / "train.py").write_text("import os, sys; print('rank', os.environ['SHOAL_RANK'], *sys.argv[1:])")
    install.install(f"{work}/stand-ins", str(Path(sys.executable).parent), None)
    return tmp_path


def shell(job: Path, line: str, **changes: str) -> str:
    """Return the output of a line of a rank's script."""
    start = f"{Path.cwd()}/stand-ins"
    variables = {
        "PATH": f"{start}/bin:{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": f"{start}/hook:{job}/own",
        "BASH_ENV": f"{start}/bash_env",
        "ENV": f"{job}/env/bin",
        "HOME": str(job),
        **RANK,
        **changes,
    }
    done = subprocess.run(
        ["/bin/bash", "-c", line], env=variables, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout + done.stderr


def worlds() -> list[str]:
    return Path("stand-ins/worlds").read_text().splitlines()


def test_each_group_that_a_program_forms_is_reported(job: Path) -> None:
    program = """
import torch.distributed.distributed_c10d as c10d
assert c10d.init_process_group.__doc__ == "Form a group."
c10d.init_process_group("gloo", world_size=2, rank=1)
for _ in range(40): c10d.init_process_group("gloo", 4, 3)
for size in range(90, 10, -1): c10d.init_process_group("gloo", size, 0)
c10d.init_process_group("gloo", 128, 7)
from jax._src.distributed import State
State().initialize(num_processes=256, process_id=0)
"""
    Path("t.py").write_text(program)
    assert shell(job, "python t.py", SHOAL_RENDEZVOUS_ROUND="2") == ""
    reports = worlds()
    assert reports[:2] == ["3 2 2 1 0.1 torch", "3 2 4 3 0.1 torch"]
    assert len(reports) == 18, "a program that forms groups all day fills no disk"
    assert reports[16:] == ["3 2 128 7 0.1 torch", "3 2 256 0 0.1 jax"], (
        "a larger group is told of in any case"
    )


def test_group_of_remote_procedure_calls_is_reported(job: Path) -> None:
    code = "import torch.distributed.rpc as rpc; rpc.init_rpc('worker1', rank=1, world_size=4)"
    assert shell(job, f'python -c "{code}"') == ""
    assert worlds() == ["3 0 4 1 0.1 rpc"]


@pytest.mark.parametrize(
    ("variables", "library"),
    [
        ({"TORCHELASTIC_RUN_ID": "att_1"}, "torch"),
        ({"TORCHELASTIC_RUN_ID": "none"}, launchers.LAUNCHED),
        ({"TORCHELASTIC_RUN_ID": "none", "SHOAL_LAUNCHER": "torchrun"}, "torch"),
    ],
)
def test_group_behind_an_unknown_launcher_is_reported_as_such(
    job: Path, variables: dict[str, str], library: str
) -> None:
    form = "import torch.distributed.distributed_c10d as c; c.init_process_group('gloo', 2, 0)"
    assert shell(job, f'python -c "{form}"', SHOAL_ATTEMPT_ID="att_1", **variables) == ""
    assert worlds() == [f"3 0 2 0 0.1 {library}"]


def test_processes_outside_of_a_rank_report_nothing(job: Path) -> None:
    form = "import torch.distributed.distributed_c10d as c; c.init_process_group('gloo', 2, 0)"
    assert shell(job, f'env -u SHOAL_RANK python -c "{form}"') == ""
    assert worlds() == []


def test_program_that_removed_the_folder_runs_on(job: Path) -> None:
    form = "import torch.distributed.distributed_c10d as c; c.init_process_group('gloo', 2, 0); print('on')"
    assert shell(job, f'rm stand-ins/worlds; python -c "{form}"') == "on\n"


def test_sitecustomize_of_the_job_is_loaded_as_without_us(job: Path) -> None:
    (job / "own" / "sitecustomize.py").write_text("import sys; sys.told = __file__")
    code = "import sys, sitecustomize as s; print(sys.told == s.__file__, 'stand-ins' in str(sys.path))"
    assert shell(job, f'python -c "{code}"') == "True False\n"


def test_error_in_the_jobs_sitecustomize_is_printed_as_without_the_hook(job: Path) -> None:
    (job / "own" / "sitecustomize.py").write_text("raise RuntimeError('theirs')")
    assert "RuntimeError: theirs" in shell(job, "python -c 'print(1)'")


ACTIVATE = 'PATH="$ENV:$PATH"; hash -r 2>/dev/null'
REACHED = [
    "torchrun --nproc-per-node 2 train.py --lr 1",
    "$ENV/torchrun --nproc-per-node 2 train.py --lr 1",
    f"{ACTIVATE}; torchrun --nproc-per-node 2 train.py --lr 1",
    f"{ACTIVATE}; exec torchrun --nproc-per-node 2 train.py --lr 1",
    f"{ACTIVATE}; export PYTHONPATH=/nowhere; torchrun --nproc-per-node 2 train.py --lr 1",
    "PATH=$ENV:$PATH torchrun --nproc-per-node 2 train.py --lr 1",
    "env PATH=$ENV:/usr/bin torchrun --nproc-per-node 2 train.py --lr 1",
    "python $ENV/torchrun train.py --lr 1",
    "python -m torch.distributed.run --nproc-per-node 2 train.py --lr 1",
    "python -I -m torch.distributed.run --nproc-per-node 2 train.py --lr 1",
    "PYTHONPATH=/nowhere python -m torch.distributed.run train.py --lr 1",
    "$PYTHON -m torch.distributed.run --nproc-per-node 2 train.py --lr 1",
    "srun -N 2 --ntasks-per-node=2 torchrun train.py --lr 1",
    "srun bash -c 'torchrun train.py --lr 1'",
    "sh -c '$ENV/torchrun train.py --lr 1'",
    "bash -l -c 'torchrun train.py --lr 1'",
    "echo torchrun train.py --lr 1 >s.sh; bash s.sh",
    'python -c \'import subprocess as s; s.run(["torchrun", "train.py", "--lr", "1"])\'',
    "$ENV/accelerate launch --num_processes 4 train.py --lr 1",
]


@pytest.mark.parametrize("line", REACHED)
def test_launcher_is_replaced_however_it_is_reached(job: Path, line: str) -> None:
    assert shell(job, line, PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="0,1") == "rank 3 --lr 1\n"


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        ("$ENV/accelerate env --json", "real accelerate env --json\n"),
        ("PATH=$ENV:$PATH; accelerate test", "real accelerate test\n"),
        ("PATH=$ENV:$PATH; accelerate", "real accelerate\n"),
        ("SHOAL_LAUNCHER=torchrun $ENV/torchrun x.py", "real torchrun x.py\n"),
        ("env -u SHOAL_RANK $ENV/torchrun x.py", "real torchrun x.py\n"),
        ("python -c 'print(1)' torchrun", "1\n"),
        ("scontrol show hostnames a,b", "a\nb\n"),
    ],
)
def test_what_is_no_launcher_here_runs_as_it_is(job: Path, line: str, printed: str) -> None:
    assert shell(job, line) == printed


@pytest.mark.parametrize("line", ["torchrun --nnodes=$N train.py", "$ENV/torchrun --nnodes $N train.py"])
def test_numbers_from_variables_are_judged_in_the_rank(job: Path, line: str) -> None:
    output = shell(job, f"{line}; echo code $?", N="8")
    assert "shoal: the launcher asks for 8 nodes, and the job has 2\nhint: " in output
    assert output.endswith(("code 2\n", "leave the option out\n"))
    assert "rank 3" not in output


def test_bash_file_of_the_job_is_read_as_without_us(job: Path) -> None:
    (job / "rc").write_text("OWN=mine")
    assert shell(job, "echo $OWN", SHOAL_BASH_ENV=f"{job}/rc") == "mine\n"


def test_what_runs_in_the_jobs_own_interpreter_is_read_by_python_3_8() -> None:
    files = [*Path(install.__file__).parent.glob("*.py")]
    assert len(files) > 8
    for file in files:
        ast.parse(file.read_text(), feature_version=(3, 8))
