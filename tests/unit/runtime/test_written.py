"""What ranks wrote and nobody keeps is counted, whatever they made of their directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.runtime import written
from shoal.wire import Written


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


def after(work: Path, *names: str, text: str = "x") -> Written | None:
    """What is counted if the files are written after the mark."""
    began = written.mark(str(work.parent))
    assert began is not None
    while (again := written.mark(str(work.parent))) is None or again.at_ns <= began.at_ns:
        pass  # the file system's clock ticks every 4 ms
    write(work, *names, text=text)
    return written.count(str(work), began)


def test_new_and_changed_files_are_counted_and_those_that_came_with_the_job_are_not(work: Path) -> None:
    write(work, "train.py", "data/x.bin", "log.txt")
    found = after(work, "out/a.pt", "out/sub/b.pt", "log.txt", text="12345")
    assert found == Written(num_files=3, num_bytes=15, names=("out/sub/b.pt", "out/a.pt", "log.txt"))


def test_the_folder_is_named_if_all_files_are_in_one_that_did_not_come_with_the_job(work: Path) -> None:
    write(work, "train.py", "data/old")
    found = after(work, "out/a.pt")
    assert found is not None
    assert found.folder == "out"
    (work / "out/a.pt").unlink()
    found = after(work, "data/new")
    assert found is not None
    assert found.folder == ""


def test_caches_and_empty_files_are_no_results(work: Path) -> None:
    assert (
        after(work, ".cache/hf/model", ".shoal/bin/python", "a/__pycache__/x.pyc", "y.pyc", "z.lock") is None
    )
    assert after(work, "empty", text="") is None


def test_links_lead_nowhere_and_what_is_kept_by_one_is_not_lost(work: Path, tmp_path: Path) -> None:
    write(tmp_path / "kept", "model.pt")
    began = written.mark(str(tmp_path))
    assert began is not None
    (work / "ckpt").symlink_to(tmp_path / "kept")
    (work / "users").symlink_to("/etc/passwd")
    (work / "loop").symlink_to(".")
    assert written.count(str(work), began) is None
    work.rename(tmp_path / "moved")
    work.symlink_to("/etc")  # even of the directory itself
    assert written.count(str(work), written.Mark(0)) is None


def test_a_tree_of_any_size_and_depth_costs_a_bounded_look(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(written, "MAX_ENTRIES", 50)
    write(work, *(f"out/{number}" for number in range(80)))
    found = written.count(str(work), written.Mark(0))
    assert found is not None
    assert found.is_more
    assert found.num_files <= 50
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
    found = written.count(str(work), written.Mark(0))
    assert found is not None
    assert (found.is_more, found.num_files) == (True, 1)


def test_names_that_are_no_text_and_sizes_beyond_reason_can_be_told(work: Path) -> None:
    (work / os.fsdecode(b"\xff\x1b]0;x\x07")).write_text("x")
    (work / ("n" * 250)).write_text("x")
    for name in ("a", "b"):
        with (work / name).open("wb") as file:
            os.truncate(file.fileno(), 1 << 43)
    os.mkfifo(work / "pipe")
    found = written.count(str(work), written.Mark(0))
    assert found is not None
    assert found.num_files == 4
    assert all(name.encode() and len(name) <= written.MAX_NAME for name in found.names)
    assert found.num_bytes <= written.MAX_BYTES


def test_a_directory_that_cannot_be_read_or_is_gone_counts_for_nothing(work: Path, tmp_path: Path) -> None:
    assert written.count(str(tmp_path / "gone"), written.Mark(0)) is None
    assert written.mark(str(tmp_path / "gone")) is None
