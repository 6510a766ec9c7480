"""File patterns name what git says they name."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from shoal.client.globs import Globs
from shoal.globs import problem_of

FILES = (
    *("a.py", "b.bin", "data/train.bin", "data/deep/er/x.bin", "data/[1].txt", "src/data/y.py", "src/a.py"),
    *(
        "src/data.py",
        "out/run1/m.pt",
        "out/run2/m.pt",
        "x y.txt",
        ".hidden/z",
        "train.bin.md",
        "doc/a/b/c.md",
    ),
)
PATTERNS = (
    *(
        "*.bin",
        "data/",
        "data",
        "/data/",
        "data/*.bin",
        "data/**/x.bin",
        "**/data",
        "src/**",
        "out/run?/m.pt",
    ),
    *("out/run[12]/m.pt", "out/run[!1]/*", "data/\\[1\\].txt", "a.*", "doc/**/c.md", "x y.txt", ".hidden"),
    *("**/er/", "doc/*/c.md", "*", "src/*", "out/**/m.pt", "data/**"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("globs")
    subprocess.run(["git", "init", "-q", root], check=True)
    for name in FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    return root


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_names_the_files_that_git_ignores_for_it(folder: Path, pattern: str) -> None:
    (folder / ".git/info/exclude").write_text(f"{pattern}\n")
    checked = subprocess.run(
        ["git", "-C", folder, "check-ignore", "--stdin", "-z"],
        input="\0".join(FILES).encode(),
        capture_output=True,
        check=False,
    )
    by_git = set(checked.stdout.decode().split("\0")) - {""}
    ours = Globs([pattern.removeprefix("/")] if not pattern.startswith("/") else [f".{pattern}"])
    assert {name for name in FILES if ours.names(name)} == by_git
    for name in by_git:  # so a search that goes where it may finds them
        above = name.split("/")[:-1]
        assert all(
            ours.may_name_below("/".join(above[: n + 1]))
            or ours.names("/".join(above[: n + 1]), is_folder=True)
            for n in range(len(above))
        )


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("", "is empty"),
        ("/etc/passwd", "is not below the workdir"),
        ("~/x", "is not below the workdir"),
        ("../x", "has `..` in it"),
        ("a/../../x", "has `..` in it"),
        ("!x", "begins with `!`"),
        ("x[ab", "without its `]`"),
        ("x\\", "ends with"),
        ("[z-a]", "without its `]`"),
        ("x" * 2000, "2,000 characters long"),
    ],
)
def test_what_is_no_pattern_for_files_of_a_folder_is_refused_in_words(pattern: str, told: str) -> None:
    assert told in (problem_of(pattern) or "")


def test_patterns_remember_which_of_them_named_nothing() -> None:
    globs = Globs(["data/", "*.bin", "missing"])
    assert globs.names("data/x.bin")
    assert globs.unused == ["missing"]


def test_a_name_of_a_thousand_folders_is_no_trouble() -> None:
    assert Globs(["*.py"]).names("/".join(["d"] * 2000) + "/x.py")
