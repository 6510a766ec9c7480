"""What a launcher's words come down to in a rank."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shoal.runtime.warm import accelerate, launchers

RANK = {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
        ("deepspeed --no_local_rank --module pkg.train --x", "-m pkg.train --x"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_launcher_comes_down_to_its_program(command: str, expected: str) -> None:
    first, *rest = command.split()
    launcher, words = launchers.named(first, rest)
    assert launcher is not None
    assert launchers.program(launcher, words, RANK) == expected.split()


@pytest.mark.parametrize("command", ["python train.py", "python -m pkg torch.distributed.run", "python -m"])
def test_other_commands_are_no_launcher(command: str) -> None:
    first, *rest = command.split()
    assert launchers.named(first, rest) == (None, rest)


STUB = """
import argparse
class Parser:
    def parse_args(self, words):
        return argparse.Namespace(words=words, use_deepspeed=False, use_fsdp=False, use_megatron_lm=False,
                                  multi_gpu=False, cpu=True)
def launch_command_parser(): return Parser()
def _validate_launch_command(args):
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
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for _ in range(2):
        found = accelerate.variables(sys.executable, str(folder), ["launch", "--mixed_precision", "bf16"])
        assert found == {"ACCELERATE_MIXED_PRECISION": "bf16"}
    assert (folder / "asked").read_text() == "x", "the second rank reads what the first was told"


def test_accelerate_is_not_asked_about_the_number_of_processes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    words = ["launch", "--num_processes", "4", "--multi_gpu"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert accelerate.variables("/no/such/python", str(folder), words) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = accelerate.variables("/no/such/python", str(folder), words)
    assert found == {"ACCELERATE_USE_CPU": "true"}, "without it each process trains for itself"
