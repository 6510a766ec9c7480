"""When a job last saved its work, from what lies in its checkpoint directory."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.engines.fake import VirtualClock
from shoal.runtime.files.checkpoint_storage import MAX_ENTRIES, SETTLED_S, LastSave, newest_write


def _write(path: Path, at: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("weights")
    os.utime(path, (at, at))


def test_newest_file_counts_in_any_folder(tmp_path: Path) -> None:
    _write(tmp_path / "step-1" / "a.pt", 1000.0)
    _write(tmp_path / "step-2" / "shard" / "b.pt", 2000.0)
    assert newest_write(str(tmp_path)) == 2000.0


def test_empty_or_missing_directory_has_no_save(tmp_path: Path) -> None:
    assert newest_write(str(tmp_path)) is None
    assert newest_write(str(tmp_path / "gone")) is None


def test_links_are_not_followed(tmp_path: Path) -> None:
    _write(tmp_path / "elsewhere" / "new", 5000.0)
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "ckpt" / "file").symlink_to(tmp_path / "elsewhere" / "new")
    assert newest_write(str(tmp_path / "ckpt")) is None


def test_number_of_files_looked_at_is_bounded(tmp_path: Path) -> None:
    for number in range(MAX_ENTRIES + 50):
        (tmp_path / str(number)).touch()
    assert newest_write(str(tmp_path)) is not None


def test_file_that_is_being_written_is_no_save(tmp_path: Path) -> None:
    clock = VirtualClock()
    saves = LastSave(str(tmp_path), clock)

    def age() -> float | None:
        saves.check()
        return saves.age_s

    assert age() is None
    _write(tmp_path / "one", clock.now())
    assert age() is None
    clock.advance(SETTLED_S + 5)
    assert age() == SETTLED_S + 5
    _write(tmp_path / "two", clock.now())
    assert age() == SETTLED_S + 5
