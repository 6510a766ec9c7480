"""File patterns match the same files as in git."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.client.left_behind import PathMatcher
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
    *("*a*.*n", "**/a/**/c.md", "doc/**/**/c.md", "**/b/**", "**/data/**/*.p*y", "d*/*e*/**/*.bin", "*1*/"),
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
    ours = PathMatcher([pattern.removeprefix("/")] if not pattern.startswith("/") else [f".{pattern}"])
    assert {name for name in FILES if ours.matches(name)} == by_git
    for name in by_git:  # a search of the permitted folders finds them
        above = name.split("/")[:-1]
        assert all(
            ours.may_name_below("/".join(above[: n + 1]))
            or ours.matches("/".join(above[: n + 1]), is_folder=True)
            for n in range(len(above))
        )


def fits(patterns: Sequence[str], names: Sequence[str]) -> bool:
    """Try all meanings of a pattern from this folder on."""
    if not patterns or not names:
        return not patterns and not names
    if patterns[0] != "**":
        return fnmatchcase(names[0], patterns[0]) and fits(patterns[1:], names[1:])
    return len(patterns) == 1 or any(fits(patterns[1:], names[number:]) for number in range(len(names)))


@given(
    st.lists(st.text("ab*?", min_size=1, max_size=5), min_size=1, max_size=6).map("/".join),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=6).map("/".join),
)
def test_the_first_place_that_fits_is_as_good_as_any(pattern: str, name: str) -> None:
    named = any(fits(pattern.split("/"), name.split("/")[: n + 1]) for n in range(name.count("/") + 1))
    assert PathMatcher([f"./{pattern}"]).matches(name) == named


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("*a" * 40 + "b", "a" * 255),
        ("x/" + "*a" * 40 + "b/y", "x/" + "a" * 255 + "/y"),
        ("**/" * 300 + "b", "a/" * 200 + "a"),
        ("**/a/" * 200 + "b", "a/" * 200 + "a"),
        ("**/*a*/" * 140 + "b", "aaaaaaaa/" * 200 + "a"),
    ],
)
@pytest.mark.timeout(20)
def test_no_pattern_takes_for_ever(pattern: str, name: str) -> None:
    globs = PathMatcher([pattern])
    assert not globs.matches(name)
    globs.may_name_below(name)


@pytest.mark.parametrize(
    ("pattern", "message"),
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
def test_what_is_no_pattern_for_files_of_a_folder_is_refused_in_words(pattern: str, message: str) -> None:
    assert message in (problem_of(pattern) or "")


def test_patterns_remember_which_of_them_named_nothing() -> None:
    globs = PathMatcher(["data/", "*.bin", "missing"])
    assert globs.matches("data/x.bin")
    assert globs.unused == ["missing"]


def test_a_name_of_a_thousand_folders_is_no_trouble() -> None:
    assert PathMatcher(["*.py"]).matches("/".join(["d"] * 2000) + "/x.py")
