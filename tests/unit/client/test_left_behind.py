"""Files that are not sent with a job are named; `include` and `exclude` decide which."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from shoal.client import left_behind as behind
from shoal.client import selection
from shoal.client.left_behind import LeftBehindFiles
from shoal.client.snapshot import take_snapshot
from shoal.errors import SpecError, TooLarge


def write(root: Path, *names: str, text: str = "x") -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder like nanoGPT's: a script makes the data, and git ignores them."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    write(tmp_path, ".gitignore", text="*.bin\n*.pkl\n__pycache__/\nout/\n.venv/\n")
    write(tmp_path, "train.py", "data/prepare.py", "data/train.bin", "data/val.bin", "data/meta.pkl")
    write(tmp_path, "__pycache__/x.pyc", ".venv/lib/big.bin")
    return tmp_path


def sent(root: Path, include: tuple[str, ...] = (), exclude: tuple[str, ...] = ()) -> list[str]:
    taken = take_snapshot(root, include=include, exclude=exclude)
    assert taken is not None
    with taken.file as file, tarfile.open(fileobj=file) as tar:
        return tar.getnames()


def stayed(root: Path, include: tuple[str, ...] = (), exclude: tuple[str, ...] = ()) -> LeftBehindFiles:
    taken = take_snapshot(root, include=include, exclude=exclude)
    assert taken is not None
    taken.file.close()
    return taken.left_behind


def test_ignored_files_that_a_job_may_need_are_counted_and_caches_are_not(folder: Path) -> None:
    left = stayed(folder)
    assert (left.num_files, left.size_bytes, left.is_more) == (3, 3, False)
    assert set(left.files) == {"data/train.bin", "data/val.bin", "data/meta.pkl"}
    assert left.add_with == "data/"
    assert {".venv/", "__pycache__/"} <= set(left.ignored)


def test_a_folder_with_nothing_but_ignored_files_is_counted_once(folder: Path) -> None:
    write(folder, "only/deep/a.bin", "only/deep/b.bin")
    left = stayed(folder)
    assert left.num_files == 5
    assert len(set(left.files)) == 5


def test_include_sends_ignored_files_and_removes_the_note(folder: Path) -> None:
    usual = [".gitignore", "data/prepare.py", "train.py"]
    assert sent(folder) == usual
    assert sent(folder, ("data/",)) == sorted([*usual, "data/meta.pkl", "data/train.bin", "data/val.bin"])
    assert sent(folder, ("data/train.bin",)) == sorted([*usual, "data/train.bin"])
    assert stayed(folder, ("*.bin", "*.pkl")).num_files == 0


def test_a_pattern_does_not_reach_into_environments_that_it_does_not_name(folder: Path) -> None:
    assert ".venv/lib/big.bin" not in sent(folder, ("*.bin",))
    assert ".venv/lib/big.bin" in sent(folder, (".venv/lib/",))


def test_exclude_overrides_include_and_its_files_are_recorded(folder: Path) -> None:
    assert sent(folder, ("data/",), ("data/val.*", "train.py")) == [
        ".gitignore",
        "data/meta.pkl",
        "data/prepare.py",
        "data/train.bin",
    ]
    left = stayed(folder, exclude=("train.py", "nothing.*"))
    assert (left.excluded, left.unused_patterns) == (("train.py",), ("nothing.*",))


def test_exclude_of_ignored_files_takes_them_out_of_the_note(folder: Path) -> None:
    write(folder, "out/large.bin", "out/kept.txt")
    left = stayed(folder, exclude=("data/", "out/*"))
    assert (left.num_files, left.unused_patterns) == (0, ())
    left = stayed(folder, exclude=("data/*.bin", "out/large.bin", ".venv", "__pycache__/"))
    assert (set(left.files), left.unused_patterns) == ({"data/meta.pkl", "out/kept.txt"}, ())
    assert {"data/train.bin", "out/large.bin", ".venv/"} <= set(left.ignored), (
        "an end that misses one can still name it"
    )


def test_exclude_makes_a_folder_without_git_small_enough_as_the_hint_says(tmp_path: Path) -> None:
    write(tmp_path, "train.py", *(f"data/{number}/x.bin" for number in range(60)))
    write(tmp_path, *(f"{number}.log" for number in range(60)))
    with pytest.raises(TooLarge, match="more than 50 files") as refused:
        take_snapshot(tmp_path, max_files=50)
    assert "`--exclude PATTERN`" in str(refused.value.hint)
    with pytest.raises(TooLarge):
        take_snapshot(tmp_path, exclude=("data/",), max_files=50)
    excluded = ("data/", "*.log", "data/1/*.bin", "other/")
    taken = take_snapshot(tmp_path, include=("*.bin",), exclude=excluded, max_files=50)
    assert taken is not None
    with taken.file as file, tarfile.open(fileobj=file) as tar:
        assert tar.getnames() == ["train.py"]
    assert {"data/", "1.log"} <= set(taken.left_behind.excluded), "an end that misses one can name it"
    assert sum(name.startswith("data") for name in taken.left_behind.excluded) == 1


def test_pattern_that_could_match_in_an_excluded_folder_is_not_reported_as_unused(
    tmp_path: Path,
) -> None:
    write(tmp_path, "train.py", "data/x.bin")
    left = stayed(tmp_path, exclude=("data/", "*.bin", "data/*.txt", "other/*.txt"))
    assert left.unused_patterns == ("other/*.txt",)


def test_include_that_matches_nothing_is_refused_with_the_nearest_name(folder: Path) -> None:
    with pytest.raises(SpecError, match=r"names no file of workdir .*did you mean `data/train.bin`"):
        sent(folder, ("data/trian.bin",))
    with pytest.raises(SpecError, match="that `exclude` does not name, too"):
        sent(folder, ("data/train.bin",), ("data/",))
    with pytest.raises(SpecError, match="names no file of workdir"):
        sent(folder, ("*a" * 400,))


@pytest.mark.parametrize("pattern", ["/etc/hostname", "../other", "a/../../b", "~/x"])
def test_include_cannot_lead_out_of_the_folder(folder: Path, pattern: str) -> None:
    with pytest.raises(SpecError, match="workdir"):
        sent(folder, (pattern,))


def test_include_does_not_follow_links_out_of_the_folder(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    write(outside, "secret.bin")
    (folder / ".gitignore").write_text("link\nfile.bin\n")
    (folder / "link").symlink_to(outside)
    (folder / "file.bin").symlink_to(outside / "secret.bin")
    for pattern in ("link/secret.bin", "link/", "link", "file.bin"):
        with pytest.raises(SpecError, match="outside"):
            sent(folder, (pattern,))


def test_limits_apply_to_included_files(folder: Path) -> None:
    write(folder, *(f"out/{number}" for number in range(20)))
    with pytest.raises(TooLarge, match="more than 10 files"):
        take_snapshot(folder, include=("out/",), max_files=10)
    with pytest.raises(TooLarge, match="0 MiB at most"):
        take_snapshot(folder, include=("out/",), max_bytes=10)


def test_a_search_for_included_files_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, *(f"out/{number}" for number in range(50)))
    monkeypatch.setattr(selection, "MAX_LOOKED", 20)
    with pytest.raises(TooLarge, match="were looked at for `include`"):
        sent(folder, ("*.none",))
    assert "data/train.bin" in sent(folder, ("data/*.bin",))  # never looks into `out`


def test_a_hundred_thousand_ignored_files_are_not_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / ".gitignore").write_text("*.bin\nnode_modules/\nbig/\n")
    write(folder, *(f"node_modules/{number}" for number in range(100)))
    write(folder, *(f"big/{number // 10}/{number}.txt" for number in range(100)))
    monkeypatch.setattr(behind, "MAX_COUNTED", 30)
    left = stayed(folder)
    assert left.is_more
    assert left.num_files < 30
    assert {"big/", "node_modules/"} <= set(left.ignored)


def test_slow_git_listing_of_ignored_files_does_not_delay_a_submit(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path_factory.mktemp("bin")
    slow = programs / "git"
    slow.write_text(f'#!/bin/sh\n[ "$7" = -i ] && exec sleep 60\nexec {shutil.which("git")} "$@"\n')
    slow.chmod(0o700)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(behind, "GIT_S", 0.1)
    assert behind._ignored_by_git(folder) == ([], True)
    assert sent(folder) == [".gitignore", "data/prepare.py", "train.py"]


def test_names_stored_with_a_job_are_bounded_text(folder: Path) -> None:
    (folder / ".gitignore").write_text("*.bin\n")
    write(folder, *(f"data/{'n' * 200}{number}.bin" for number in range(100)))
    (folder / "data" / "\udcff.bin").write_text("x")
    left = stayed(folder)
    size = sum(len(name.encode()) for name in (*left.ignored, *left.files))  # encodes: no surrogates
    assert size <= 2 * behind.MAX_NAMES_BYTES
    assert left.num_files == 103


def test_environment_or_cache_with_a_marker_file_is_not_counted(folder: Path) -> None:
    (folder / ".gitignore").write_text("myenv/\nstuff/\n")
    write(folder, "myenv/pyvenv.cfg", "myenv/lib/x", "stuff/CACHEDIR.TAG", "stuff/y")
    assert stayed(folder).num_files == 0
    assert set(stayed(folder).ignored) >= {"myenv/", "stuff/"}


def test_the_pattern_to_add_takes_special_characters_as_they_are() -> None:
    assert LeftBehindFiles(files=("a[1]*.bin",)).add_with == "a\\[1\\]\\*.bin"
    assert LeftBehindFiles(files=("x.bin", "data/y.bin")).add_with == "x.bin"
