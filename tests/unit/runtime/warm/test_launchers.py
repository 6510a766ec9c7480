"""Which program a launcher's command line means in a rank."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shoal.runtime.warm import launcher_config, launchers, options, srun

RANK = {
    "SHOAL_RANK": "0",
    "SHOAL_LOCAL_RANK": "0",
    "SHOAL_WORLD_SIZE": "4",
    "SHOAL_RANKS_PER_NODE": "2",
    "SHOAL_NUM_NODES": "2",
    "SHOAL_NODE_RANK": "1",
    "SHOAL_MASTER_ADDR": "10.0.0.1",
    "SHOAL_MASTER_PORT": "30001",
}
ONE_EACH = {**RANK, "SHOAL_WORLD_SIZE": "2", "SHOAL_RANKS_PER_NODE": "1"}
ALONE = {**ONE_EACH, "SHOAL_WORLD_SIZE": "1", "SHOAL_NUM_NODES": "1", "SHOAL_NODE_RANK": "0"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("train.py", "base.py", "tool"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def taken_apart(command: str) -> options.LauncherCommand:
    first, *rest = command.split()
    launcher, arguments = launchers.recognize(first, rest)
    assert launcher is not None
    return options.read(launcher, arguments)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("torchrun --nproc-per-node 2 --standalone train.py --lr 1", "train.py --lr 1"),
        ("torchrun --nproc_per_node=2 -m pkg.train --lr 1", "-m pkg.train --lr 1"),
        ("python -m torch.distributed.run --nproc-per-node=2 train.py -m", "train.py -m"),
        ("python3 -u -m torch.distributed.run --nnodes 2 train.py", "train.py"),
        ("python -m torch.distributed.launch train.py --lr 1", "train.py --local-rank=0 --lr 1"),
        ("python -m torch.distributed.launch --use_env train.py", "train.py"),
        ("accelerate launch --num_processes 4 --mixed_precision bf16 train.py", "train.py"),
        ("accelerate launch -m pkg.train", "-m pkg.train"),
        (
            "deepspeed --num_gpus=2 train.py --deepspeed ds.json",
            "train.py --local_rank=0 --deepspeed ds.json",
        ),
        ("python -E -u -W ignore -m torch.distributed.run --nnodes 1:4 train.py", "train.py"),
        ("python /my/env/bin/torchrun --nproc-per-node=auto train.py", "train.py"),
        ("python /my/env/bin/accelerate launch --num_machines 2 train.py", "train.py"),
        ("accelerate-launch train.py", "train.py"),
        ("torchrun --nnodes=2:3 --nproc-per-node=2 train.py", "train.py"),
        ("deepspeed --no_local_rank --module pkg.train --x", "-m pkg.train --x"),
        ("torchrun -m --nproc-per-node 2 pkg.train --lr 1", "-m pkg.train --lr 1"),
        ("torchrun --role base.py tool --config base.py", "tool --config base.py"),
        ("torchrun -r3 -t=2 --stand --nproc_per 2 -- tool base.py", "tool base.py"),
        ("torchrun --run-path train.py -- -- --lr 1", "train.py -- --lr 1"),
        ("torchrun --nnodes --nproc-per-node 2 train.py", "train.py"),
        ("deepspeed --num_g 2 --launcher base.py tool --num_gpus 9", "tool --local_rank=0 --num_gpus 9"),
        ("deepspeed --num_nodes -1 train.py", "train.py --local_rank=0"),
        ("accelerate launch --gpu_ids base.py --debug tool base.py", "tool base.py"),
        ("python -mtorch.distributed.run train.py", "train.py"),
        ("python -um torch.distributed.run train.py", "train.py"),
        ("python -X dev -Wignore -- /my/env/bin/torchrun train.py", "train.py"),
        ("python /my/env/bin/ds train.py", "train.py --local_rank=0"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_launcher_comes_down_to_its_program(command: str, expected: str) -> None:
    assert launchers.program_arguments(taken_apart(command), RANK, {}) == expected.split()


def test_torchrun_variable_may_select_a_module() -> None:
    environment = {**RANK, "PET_MODULE": "1"}
    assert launchers.program_arguments(taken_apart("torchrun pkg.train"), environment, {}) == [
        "-m",
        "pkg.train",
    ]
    assert launchers.program_arguments(taken_apart("torchrun /"), {**RANK, "PET_MODULE": "0"}, {}) == ["/"]


@pytest.mark.parametrize(
    "command",
    [
        "python train.py",
        "python -m pkg torch.distributed.run",
        "python -m",
        "python -c torchrun",
        "python tools/torchrun.py",
        "accelerate",
        "accelerate env",
        "accelerate test --config_file a.yaml",
        "accelerate estimate-memory launch",
        "python -m accelerate.commands.accelerate_cli config default",
    ],
)
def test_other_commands_are_no_launcher(command: str) -> None:
    first, *rest = command.split()
    assert launchers.recognize(first, rest) == (None, rest)


@pytest.mark.parametrize(
    ("command", "environment", "message", "hint"),
    [
        ("torchrun --nproc-per-node 4 train.py", RANK, "4 processes on a node, and the job has 2", ": 4`"),
        ("torchrun --nnodes=8 train.py", RANK, "8 nodes, and the job has 2", "`--nodes 8`"),
        ("torchrun --nnodes 1 train.py", RANK, "1 node, and the job has 2", "`--nodes 1`"),
        ("torchrun --nnodes 3:5 train.py", RANK, "3:5 nodes, and the job has 2", "`--nodes 3..5`"),
        ("accelerate launch --num_machines 4 train.py", RANK, "4 nodes", "`--nodes 4`"),
        ("accelerate launch --num_processes 8 train.py", RANK, "8 processes in all", ": 4`"),
        ("accelerate launch --num_processes 4 train.py", ONE_EACH, "4 processes in all", ": 2`"),
        ("deepspeed --num_gpus 2 --num_nodes 2 train.py", ONE_EACH, "2 processes on a node", ": 2`"),
        ("deepspeed --num_nodes 1 train.py", ONE_EACH, "1 node", "`--nodes 1`"),
        ("torchrun --nproc_per 4 train.py", RANK, "4 processes on a node, and the job has 2", ": 4`"),
        ("torchrun --nproc-per-node 4 --nproc-per-node 2 --nn 8 train.py", RANK, "8 nodes", "`--nodes 8`"),
        ("deepspeed --num_accel 4 train.py", RANK, "4 processes on a node", ": 4`"),
        (
            "torchrun train.py",
            {**RANK, "PET_NNODES": "8"},
            "8 nodes (`PET_NNODES`), and the job has 2",
            "or leave `PET_NNODES` out",
        ),
        ("torchrun train.py", {**RANK, "PET_NPROC_PER_NODE": "4"}, "4 processes on a node (`PET_", ": 4`"),
        (
            "torchrun --nproc-per-node=four train.py",
            RANK,
            "`four` processes on a node, which is no num",
            "a num",
        ),
        ("torchrun --nnodes two train.py", RANK, "`two` nodes, which is no number", "write a number"),
        ("accelerate launch --num_processes 4x train.py", RANK, "`4x` processes, which", "write a number"),
        (
            "torchrun train.py",
            {**RANK, "PET_NPROC_PER_NODE": "all"},
            "`all` processes on a node (`PET_",
            "leave `PET",
        ),
        ("torchrun --nproc-per-node 2", RANK, "has no program", "python your_program.py"),
        ("torchrun --nproc-per-node 2 ./program base.py", RANK, "start `./program`, and there is no", "path"),
        ("accelerate launch tools_train base.py", RANK, "start `tools_train`, and there is no such", "path"),
        ("torchrun --no-python ./run.sh train.py", RANK, "cannot start `./run.sh`", "`./run.sh train.py`"),
        ("accelerate launch --no_python ./run.sh", RANK, "cannot start `./run.sh`", "`./run.sh`"),
        ("torchrun tool", {**RANK, "PET_NO_PYTHON": "1"}, "cannot start `tool`", "without the launcher"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_launcher_that_contradicts_its_job_says_what_to_write(
    command: str, environment: dict[str, str], message: str, hint: str
) -> None:
    with pytest.raises(launchers.LauncherRefused) as refused:
        launchers.program_arguments(taken_apart(command), environment, {})
    assert message in refused.value.message
    assert hint in refused.value.hint


HERE = "--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port"


@pytest.mark.parametrize(
    ("command", "environment", "expected"),
    [
        ("torchrun --nproc-per-node 4 train.py -x", ONE_EACH, f"{HERE} 30001 --nproc-per-node 4 train.py -x"),
        (
            "torchrun --nnodes=2 --node_rank=1 --master_addr=a --master_port=7 --nproc_per_node=4 train.py",
            ONE_EACH,
            f"{HERE} 7 --nproc_per_node=4 train.py",
        ),
        (
            "torchrun --standalone --rdzv-backend c10d --rdzv_endpoint=h:1 --nproc-per-node 4 train.py",
            ONE_EACH,
            f"{HERE} 30001 --nproc-per-node 4 train.py",
        ),
        (
            "torchrun --nnodes= --nproc-per-node 4 --master-port 9 train.py",
            ALONE,
            "--nproc-per-node 4 --master-port 9 train.py",
        ),
        ("accelerate launch --num_processes 2 train.py", ALONE, "--num_processes 2 train.py"),
        ("torchrun --nproc-per-node 4 --no-python ./a", ALONE, "--nproc-per-node 4 --no-python ./a"),
        (
            "torchrun --node_r 1 --master-p 7 --stand --nproc_per 4 train.py",
            ONE_EACH,
            f"{HERE} 7 --nproc_per 4 train.py",
        ),
        (
            "torchrun --nproc-per-node cpu train.py",
            {**ALONE, "SLURM_CPUS_ON_NODE": "4"},
            "--nproc-per-node cpu --nproc-per-node 4 train.py",
        ),
        (
            "torchrun train.py",
            {**ONE_EACH, "SLURM_CPUS_ON_NODE": "4", "PET_NPROC_PER_NODE": "auto", "PET_STANDALONE": "1"},
            f"{HERE} 30001 --nproc-per-node 4 train.py",
        ),
        (
            "torchrun --nproc-per-node gpu train.py",
            {**ALONE, "SLURM_CPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1"},
            "--nproc-per-node gpu --nproc-per-node 2 train.py",
        ),
        ("torchrun --help train.py", ALONE, "--help train.py"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_real_launcher_starts_what_the_job_leaves_to_it_as_one_group(
    command: str, environment: dict[str, str], expected: str
) -> None:
    read = taken_apart(command)
    assert launchers.program_arguments(read, environment, {}) is None
    module, *arguments = launchers.real_launcher_arguments(read, environment)[1:]
    assert launchers.MODULES[module] == read.name
    assert arguments == expected.split()
    for_it = launchers.real_environment(read, {**environment, "OMPI_COMM_WORLD_SIZE": "2", "A": "b"})
    assert for_it["SHOAL_LAUNCHER"] == read.name, "or it would be replaced again"
    assert ("OMPI_COMM_WORLD_SIZE" in for_it, for_it["A"]) == (False, "b")
    assert "PET_STANDALONE" not in for_it, "the nodes meet where the job says"


@pytest.mark.parametrize("value", ["cpu", "gpu", "auto", "xpu"])
@pytest.mark.usefixtures("folder")
def test_torchrun_that_counts_devices_takes_the_ranks_that_the_job_has(value: str) -> None:
    several = {**RANK, "SLURM_CPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    for environment in (several, {**ALONE, "SLURM_CPUS_ON_NODE": "1"}):
        command = taken_apart(f"torchrun --nproc-per-node {value} train.py")
        assert launchers.program_arguments(command, environment, {}) == ["train.py"]


@pytest.mark.parametrize(
    ("command", "program", "problem"),
    [
        ("torchrun train.py", "torchrun train.py", None),
        ("-n4 -l --cpu-bind=none --export=ALL,LR=1 python t.py -n 3", "python t.py -n 3", None),
        ("--ntasks-per-node 2 -N2 --gres gpu:2 python t.py", "python t.py", None),
        ("--nodes=1 --ntasks=1 -w node-1 hostname -I", "hostname -I", None),
        ("-n 8 python t.py", "python t.py", "asks for 8 tasks, and the job has 4"),
        ("-N 4 python t.py", "python t.py", "asks for 4 nodes, and the job has 2"),
        ("-n 4", "", "has no program behind its options"),
        ("--propagate -K -lun4 --immediate python t.py", "python t.py", None),
        ("-lN 2 -k2 --pty bash -i", "bash -i", None),
        ("-qnormal -lun8 python t.py", "python t.py", "asks for 8 tasks, and the job has 4"),
    ],
)
def test_srun_comes_down_to_its_program(
    command: str, program: str, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    step = srun.read(command.split())
    refusal = srun.problem_of(step)
    assert (step.program, refusal and refusal[0]) == (program.split(), problem)
    assert step.variables == ({"LR": "1"} if "LR" in command else {})


BF16 = options.read("accelerate-launch", ["--mixed_precision", "bf16", "train.py"])
STUB = """
import argparse
class Parser:
    def parse_args(self, words):
        return argparse.Namespace(words=words, use_deepspeed=False, use_fsdp=False, use_megatron_lm=False,
                                  multi_gpu=False, cpu=True)
def launch_command_parser(): return Parser()
def _validate_launch_command(args):
    assert args.words[2:4] == ["--main_process_ip", "10.0.0.1"], "the job knows the address"
    with open("asked", "a") as file: file.write("x")
    return args, None, False
def prepare_simple_launcher_cmd_env(args):
    return [], {"ACCELERATE_MIXED_PRECISION": args.words[1], "RANK": "7"}
"""


def test_options_of_accelerate_become_the_variables_that_it_derives_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("commands", "utils"):
        (folder / "accelerate" / name).mkdir(parents=True)
        (folder / "accelerate" / name / "launch.py").write_text(STUB)
        (folder / "accelerate" / name / "__init__.py").touch()
    (folder / "accelerate" / "__init__.py").touch()  # a package of its own, before the one that is installed
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("SHOAL_MASTER_ADDR", "10.0.0.1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for _ in range(2):
        settings = launcher_config.accelerate_settings(sys.executable, str(folder), BF16)
        assert settings == ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {})
    assert (folder / "asked").read_text() == "x", "the second rank reads what the first was told"


def test_accelerate_is_asked_once_though_each_group_meets_at_a_port_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def answer(python: str, arguments: list[str]) -> list[object]:
        calls.append(arguments)
        return [{"ACCELERATE_MIXED_PRECISION": "bf16"}, None, None, ""]

    monkeypatch.setattr(launcher_config, "_ask_accelerate", answer)
    for port in ("30001", "30002"):
        monkeypatch.setenv("SHOAL_MASTER_PORT", port)
        variables, _ = launcher_config.accelerate_settings("python", str(folder), BF16)
        assert variables["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert len(calls) == 1


def test_accelerate_is_not_asked_about_the_number_of_processes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    command = taken_apart("accelerate launch --num_processes 4 --multi-gpu -m pkg.train")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert launcher_config.accelerate_settings("/no/such/python", str(folder), command) == ({}, {})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    variables, _ = launcher_config.accelerate_settings("/no/such/python", str(folder), command)
    assert variables == {"ACCELERATE_USE_CPU": "true"}, "without it each process trains for itself"
