"""A file that a program did not find and that stayed behind is named, with what to write."""

from __future__ import annotations

import msgspec
import pytest

from shoal.runtime.missing_files import explain
from shoal.wire import LeftBehind
from tests.support.shares import an_order

WORK = "/home/shoal/spool/live/att_1/node-1/work"
BEHIND = LeftBehind(
    folder="/home/ana/nanogpt",
    ignored=("data/train.bin", "data/meta.pkl", "weights/", "local_module.py", ".venv/"),
    excluded=("notes/a.txt",),
)
IGNORED = "it is in the folder that was submitted but ignored by git"


def told(words: str, run: str = "python train.py", behind: LeftBehind | None = BEHIND) -> str:
    return explain(words, msgspec.structs.replace(an_order(), run=run, left_behind=behind), WORK)


@pytest.mark.parametrize(
    "words",
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
def test_a_missed_file_that_git_ignores_is_explained(words: str) -> None:
    noise = 'Traceback (most recent call last):\n  File "x.py", line 3, in <module>\n'
    assert told(f"{noise}{words}\nnanobind: leaked 3 instances!") == (
        f"`data/train.bin` was not found; {IGNORED}; add it with `include: [data/train.bin]`"
    )


def test_a_file_in_a_folder_that_stayed_as_a_whole_is_explained_by_the_folder() -> None:
    words = "FileNotFoundError: [Errno 2] No such file or directory: 'weights/model.pt'"
    assert told(words) == f"`weights/model.pt` was not found; {IGNORED}; add it with `include: [weights/]`"


def test_a_module_that_stayed_behind_is_explained() -> None:
    words = "ModuleNotFoundError: No module named 'local_module'"
    assert told(words).startswith(f"`local_module.py` was not found; {IGNORED}")
    assert told("ModuleNotFoundError: No module named 'weights.resnet'").endswith("`include: [weights/]`")


def test_an_excluded_file_is_explained_by_the_jobs_own_pattern() -> None:
    words = "FileNotFoundError: [Errno 2] No such file or directory: 'notes/a.txt'"
    assert "excluded by the job's `exclude`; take the pattern out" in told(words)


def test_a_path_of_the_submitters_machine_is_told_as_it_counts_in_the_job() -> None:
    words = "python3: can't open file '/home/ana/nanogpt/train.py': [Errno 2] No such file or directory"
    assert told(words).endswith("write `train.py`")


@pytest.mark.parametrize("path", [f"{WORK}/../w.py", f"{WORK.rpartition('/')[0]}/w.py", "../w.py"])
def test_a_program_above_the_folder_is_explained(path: str) -> None:
    words = f"python3: can't open file '{path}': [Errno 2] No such file or directory"
    assert told(words).startswith("`../w.py` is outside of the folder that was submitted, /home/ana/nanogpt,")
    assert told(words, behind=None).startswith("`../w.py` is outside of the folder that was submitted and")


@pytest.mark.parametrize(
    "words",
    [
        "",
        "ValueError: data/train.bin has the wrong shape",
        "FileNotFoundError: [Errno 2] No such file or directory: 'other.bin'",
        "FileNotFoundError: [Errno 2] No such file or directory: '/usr/share/x'",
        "KeyError: key not found in file",
        "No module named 'torch'",
    ],
)
def test_nothing_is_said_of_what_did_not_stay_behind(words: str) -> None:
    assert told(words) == ""


def test_a_program_that_went_elsewhere_may_mean_another_folder() -> None:
    words = "FileNotFoundError: [Errno 2] No such file or directory: '../missing.txt'"
    assert told(words, run="cd sub && python x.py") == ""


def test_hostile_words_cost_little_and_stay_short() -> None:
    assert told(("No such file " + "'x' " * 20000 + "\n") * 5) == ""
    long = LeftBehind(ignored=("a" * 5000,))
    assert len(told(f"No such file or directory: '{'a' * 5000}'", behind=long)) < 1000
