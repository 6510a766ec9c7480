"""Files that ranks wrote and that are lost are counted, for any shape of their directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.runtime.files import job_files
from shoal.wire import WrittenFiles


def write(root: Path, *names: str, text: str = "x") -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    path = tmp_path / "work"
    path.mkdir()
    return path


def after(work: Path, *names: str, text: str = "x") -> WrittenFiles | None:
    """Return the count for files that are written after the mark."""
    began = job_files.make_mark(str(work.parent))
    assert began is not None
    while (again := job_files.make_mark(str(work.parent))) is None or again.at_ns <= began.at_ns:
        pass  # the file system's clock ticks every 4 ms
    write(work, *names, text=text)
    return job_files.count_written(str(work), began)


def test_only_new_and_changed_files_are_counted(work: Path) -> None:
    write(work, "train.py", "data/x.bin", "log.txt")
    written = after(work, "out/a.pt", "out/sub/b.pt", "log.txt", text="12345")
    assert written == WrittenFiles(num_files=3, num_bytes=15, names=("out/sub/b.pt", "out/a.pt", "log.txt"))


def test_folder_is_named_if_it_holds_all_files_and_is_new(work: Path) -> None:
    write(work, "train.py", "data/old")
    written = after(work, "out/a.pt")
    assert written is not None
    assert written.folder == "out"
    (work / "out/a.pt").unlink()
    written = after(work, "data/new")
    assert written is not None
    assert written.folder == ""


def test_caches_and_empty_files_are_no_results(work: Path) -> None:
    assert (
        after(work, ".cache/hf/model", ".shoal/bin/python", "a/__pycache__/x.pyc", "y.pyc", "z.lock") is None
    )
    assert after(work, "empty", text="") is None


def test_links_are_not_followed(work: Path, tmp_path: Path) -> None:
    write(tmp_path / "kept", "model.pt")
    began = job_files.make_mark(str(tmp_path))
    assert began is not None
    (work / "ckpt").symlink_to(tmp_path / "kept")
    (work / "users").symlink_to("/etc/passwd")
    (work / "loop").symlink_to(".")
    assert job_files.count_written(str(work), began) is None
    work.rename(tmp_path / "moved")
    work.symlink_to("/etc")  # even of the directory itself
    assert job_files.count_written(str(work), job_files.WriteMark(0)) is None


def test_count_is_bounded_for_a_tree_of_any_size_and_depth(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_files, "MAX_ENTRIES", 50)
    write(work, *(f"out/{number}" for number in range(80)))
    written = job_files.count_written(str(work), job_files.WriteMark(0))
    assert written is not None
    assert written.is_truncated
    assert written.num_files <= 50
    for path in (work / "out").iterdir():
        path.unlink()
    write(work, "out/x")
    deep = os.open(work, os.O_RDONLY)
    for _ in range(200):
        os.mkdir("d", dir_fd=deep)
        inner = os.open("d", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = inner
    os.close(deep)
    written = job_files.count_written(str(work), job_files.WriteMark(0))
    assert written is not None
    assert (written.is_truncated, written.num_files) == (True, 1)


def test_names_that_are_no_text_and_huge_sizes_are_reported(work: Path) -> None:
    (work / os.fsdecode(b"\xff\x1b]0;x\x07")).write_text("x")
    (work / ("n" * 250)).write_text("x")
    for name in ("a", "b"):
        with (work / name).open("wb") as file:
            os.truncate(file.fileno(), 1 << 43)
    os.mkfifo(work / "pipe")
    written = job_files.count_written(str(work), job_files.WriteMark(0))
    assert written is not None
    assert written.num_files == 4
    assert all(name.encode() and len(name) <= job_files.MAX_NAME for name in written.names)
    assert written.num_bytes <= job_files.MAX_BYTES


def test_unreadable_or_missing_directory_counts_nothing(work: Path, tmp_path: Path) -> None:
    assert job_files.count_written(str(tmp_path / "gone"), job_files.WriteMark(0)) is None
    assert job_files.make_mark(str(tmp_path / "gone")) is None
