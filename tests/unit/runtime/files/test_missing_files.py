"""A missing file that was left behind is explained, with what to write."""

from __future__ import annotations

import pytest

from shoal.runtime.files.job_files import explain_missing_file
from shoal.wire import LeftBehind, TaskProgram

WORK = "/home/shoal/spool/live/att_1/node-1/work"
BEHIND = LeftBehind(
    folder="/home/ana/nanogpt",
    ignored=("data/train.bin", "data/meta.pkl", "weights/", "local_module.py", ".venv/"),
    excluded=("notes/a.txt",),
)
IGNORED = "it is in the folder that was submitted but ignored by git"


def explain(output: str, run: str = "python train.py", behind: LeftBehind | None = BEHIND) -> str:
    return explain_missing_file(output, TaskProgram(run=run, left_behind=behind), WORK)


@pytest.mark.parametrize(
    "output",
    [
        "FileNotFoundError: [Errno 2] No such file or directory: 'data/train.bin'",
        f"FileNotFoundError: [Errno 2] No such file or directory: '{WORK}/data/train.bin'",
        "FileNotFoundError: [Errno 2] No such file or directory: '/home/ana/nanogpt/data/train.bin'",
        "FileNotFoundError: [Errno 2] No such file or directory: './data/../data/train.bin'",
        "FileNotFoundError: [Errno 2] No such file or directory: '../data/train.bin'",
        "FileNotFoundError: [Errno 2] No such file or directory: 'train.bin'",
        "cat: data/train.bin: No such file or directory",
        "/bin/bash: line 1: data/train.bin: No such file or directory",
        "ls: cannot access 'data/train.bin': No such file or directory",
        "fopen data/train.bin failed: No such file or directory",
        "OSError: Unable to open file (unable to open file: name = 'data/train.bin', errno = 2)",
        "RuntimeError: data/train.bin does not exist",
        'Error: Could not find "data/train.bin"',
    ],
)
def test_missing_file_that_git_ignores_is_explained(output: str) -> None:
    noise = 'Traceback (most recent call last):\n  File "x.py", line 3, in <module>\n'
    assert explain(f"{noise}{output}\nnanobind: leaked 3 instances!") == (
        f"`data/train.bin` was not found; {IGNORED}; add it with `include: [data/train.bin]`"
    )


def test_missing_file_of_an_ignored_folder_is_explained_by_the_folder() -> None:
    output = "FileNotFoundError: [Errno 2] No such file or directory: 'weights/model.pt'"
    assert (
        explain(output) == f"`weights/model.pt` was not found; {IGNORED}; add it with `include: [weights/]`"
    )


def test_missing_module_is_explained() -> None:
    output = "ModuleNotFoundError: No module named 'local_module'"
    assert explain(output).startswith(f"`local_module.py` was not found; {IGNORED}")
    assert explain("ModuleNotFoundError: No module named 'weights.resnet'").endswith("`include: [weights/]`")


def test_excluded_file_is_explained_by_exclude() -> None:
    output = "FileNotFoundError: [Errno 2] No such file or directory: 'notes/a.txt'"
    assert "excluded by the job's `exclude`; take the pattern out" in explain(output)


def test_file_that_is_ignored_and_excluded_is_explained_by_exclude() -> None:
    """`exclude` is stronger than `include`, so adding the file to `include` would change nothing."""
    behind = LeftBehind(ignored=("data/train.bin",), excluded=("data/train.bin",))
    error = "FileNotFoundError: [Errno 2] No such file or directory: 'data/train.bin'"
    message = explain(error, behind=behind)
    assert "excluded by the job's `exclude`; take the pattern out of `exclude`" in message
    assert "include" not in message


def test_ignored_file_is_not_taken_for_an_excluded_one_of_the_same_name() -> None:
    behind = LeftBehind(ignored=("train.bin",), excluded=("old/train.bin",))
    error = "FileNotFoundError: [Errno 2] No such file or directory: 'train.bin'"
    assert explain(error, behind=behind).endswith("add it with `include: [train.bin]`")


def test_path_of_the_submitters_machine_is_translated() -> None:
    output = "python3: can't open file '/home/ana/nanogpt/train.py': [Errno 2] No such file or directory"
    assert explain(output).endswith("write `train.py`")


@pytest.mark.parametrize("path", [f"{WORK}/../w.py", f"{WORK.rpartition('/')[0]}/w.py", "../w.py"])
def test_program_above_the_folder_is_explained(path: str) -> None:
    output = f"python3: can't open file '{path}': [Errno 2] No such file or directory"
    assert explain(output).startswith(
        "`../w.py` is outside of the folder that was submitted, /home/ana/nanogpt,"
    )
    assert explain(output, behind=None).startswith(
        "`../w.py` is outside of the folder that was submitted and"
    )


@pytest.mark.parametrize(
    "output",
    [
        "",
        "ValueError: data/train.bin has the wrong shape",
        "FileNotFoundError: [Errno 2] No such file or directory: 'other.bin'",
        "FileNotFoundError: [Errno 2] No such file or directory: '/usr/share/x'",
        "KeyError: key not found in file",
        "No module named 'torch'",
    ],
)
def test_files_that_were_not_left_behind_are_not_explained(output: str) -> None:
    assert explain(output) == ""


def test_relative_path_is_not_explained_after_a_change_of_directory() -> None:
    output = "FileNotFoundError: [Errno 2] No such file or directory: '../missing.txt'"
    assert explain(output, run="cd sub && python x.py") == ""


def test_hostile_output_costs_little_and_the_message_stays_short() -> None:
    assert explain(("No such file " + "'x' " * 20000 + "\n") * 5) == ""
    long = LeftBehind(ignored=("a" * 5000,))
    assert len(explain(f"No such file or directory: '{'a' * 5000}'", behind=long)) < 1000
