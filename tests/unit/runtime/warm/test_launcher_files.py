"""Numbers that a launcher reads from files must be the job's, or the rank ends."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from shoal.runtime.warm import launcher_config, launchers, options

TWO_OF_TWO = {"SHOAL_WORLD_SIZE": "4", "SHOAL_RANKS_PER_NODE": "2", "SHOAL_NUM_NODES": "2"}
ONE = {"SHOAL_WORLD_SIZE": "1", "SHOAL_RANKS_PER_NODE": "1", "SHOAL_NUM_NODES": "1"}
CONFIG = """
distributed_type: MULTI_CPU
num_machines: 2
num_processes: 4
main_process_ip: 10.0.0.1
main_process_port: 29500
mixed_precision: bf16
use_cpu: true
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").touch()
    (tmp_path / "hosts").write_text("# mine\nnode-1 slots=2\n\nnode-2 slots=2\n")
    (tmp_path / "more").write_text("node-1 slots=4\nnode-2 slots=4\nnode-3 slots=2\n")
    (tmp_path / "bad").write_text("node-1 4\n")
    monkeypatch.chdir(tmp_path)
    for name in ("CUDA_VISIBLE_DEVICES", "XDG_CACHE_HOME", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path


def refused_by_deepspeed(arguments: str, job: dict[str, str]) -> tuple[str, str] | None:
    command = options.read("deepspeed", [*arguments.split(), "train.py"])
    try:
        launchers.program_arguments(command, job, launcher_config.deepspeed_counts(command))
    except launchers.LauncherRefused as refused:
        return refused.message, refused.hint
    return None


@pytest.mark.parametrize(
    "arguments",
    [
        "--hostfile hosts",
        "-H more --include node-1:0,1@node-2:2,3",
        "--hostfile more --num_nodes 2 --num_gpus 2",
        "-H more --exclude node-1:0,1@node-2:0,1@node-3",
        "--hostfile missing",
        "--include localhost:1,3",
        "--include localhost",
    ],
)
@pytest.mark.usefixtures("folder")
def test_hosts_of_deepspeed_that_are_as_many_as_the_nodes_are_passed_over(arguments: str) -> None:
    assert refused_by_deepspeed(arguments, TWO_OF_TWO) is None


@pytest.mark.parametrize(
    ("arguments", "job", "message", "hint"),
    [
        ("--hostfile hosts", ONE, "2 nodes (`hosts`), and the job has 1", "or leave `--hostfile` out"),
        ("-H more --num_nodes 2", TWO_OF_TWO, "4 processes on a node (`more`)", "`ranks_per_node: 4`"),
        ("-H more", TWO_OF_TWO, "2 and 4 processes on different nodes", "leave `--hostfile` out"),
        ("-H hosts -i node-1", TWO_OF_TWO, "1 node (`--include`)", "or leave `--include` out"),
        ("-H hosts -e node-1", TWO_OF_TWO, "1 node (`--exclude`)", "or leave `--exclude` out"),
        ("-H hosts -i node-9", TWO_OF_TWO, "names `node-9`, and there is only node-1, node-2", "`--include`"),
        ("-H hosts -e node-1:x", TWO_OF_TWO, "names `node-1:x`", "leave `--exclude` out"),
        ("--include localhost:0", TWO_OF_TWO, "1 process on a node (`--include`)", "`ranks_per_node: 1`"),
        ("-H bad", TWO_OF_TWO, "cannot read the line `node-1 4` of `bad`", "NAME slots=NUMBER"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_hosts_of_deepspeed_that_contradict_the_job_are_refused(
    arguments: str, job: dict[str, str], message: str, hint: str
) -> None:
    refused = refused_by_deepspeed(arguments, job)
    assert refused is not None
    assert message in refused[0]
    assert hint in refused[1]


def test_gpus_that_deepspeed_excludes_are_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert refused_by_deepspeed("--exclude localhost:3", TWO_OF_TWO) is not None
    assert refused_by_deepspeed("--exclude localhost:2,3", TWO_OF_TWO) is None


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="Accelerate is not installed")
@pytest.mark.parametrize("place", ["own.yaml", "hf/accelerate/default_config.yaml"])
def test_numbers_in_a_file_of_accelerate_are_compared_with_the_job(
    place: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = folder / place
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(CONFIG)
    for name, value in ONE.items():
        monkeypatch.setenv(name, value)
    arguments = ["--config_file", place, "train.py"] if place == "own.yaml" else ["train.py"]
    command = options.read("accelerate-launch", arguments)
    variables, numbers = launcher_config.accelerate_settings(sys.executable, str(folder), command)
    assert variables["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert launchers.program_arguments(command, TWO_OF_TWO, numbers) == ["train.py"]
    with pytest.raises(launchers.LauncherRefused) as refused:
        launchers.program_arguments(command, ONE, numbers)
    assert "asks for 2 nodes" in refused.value.message
    assert place in refused.value.message
    assert "or write `--num_machines 1` behind `accelerate launch`" in refused.value.hint
    overriding = options.read(
        "accelerate-launch", ["--num_machines", "1", "--num_processes", "1", *arguments]
    )
    assert launchers.program_arguments(overriding, ONE, numbers) == ["train.py"], "options go before the file"


def test_rewritten_accelerate_config_is_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter((2, 4))
    monkeypatch.setattr(launcher_config, "_ask_accelerate", lambda *_: [{}, next(counts), 1, "c.yaml"])
    command = options.read("accelerate-launch", ["--config_file", "c.yaml", "train.py"])
    settings = []
    for text in ("a", "a", "b"):
        (folder / "c.yaml").write_text(text)
        _, numbers = launcher_config.accelerate_settings("python", str(folder), command)
        settings.append(numbers["num-processes"].value)
    assert settings == ["2", "2", "4"]


def test_options_that_accelerate_refuses_end_the_rank(folder: Path) -> None:
    python = folder / "python"
    python.write_text("#!/bin/sh\necho 'ValueError: choose one' >&2; exit 1")
    python.chmod(0o700)
    command = options.read("accelerate-launch", ["--cpu", "train.py"])
    with pytest.raises(launchers.LauncherRefused, match="refuses its options: ValueError: choose one"):
        launcher_config.accelerate_settings(str(python), str(folder), command)
