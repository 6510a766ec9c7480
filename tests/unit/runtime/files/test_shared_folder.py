"""One work folder for all nodes of an attempt: made once, by any node, whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.errors import SpecError
from shoal.runtime.files import removal, unpack
from tests.support.archives import tar_of

RAW = tar_of({"train.py": b"print()\n", "data/x.txt": b"x"})
DIGEST = hashlib.sha256(RAW).hexdigest()


@pytest.fixture
def archive(tmp_path: Path) -> Callable[[], int]:
    """Open the archive, as each node does for itself."""
    path = tmp_path / "archive.tar"
    path.write_bytes(RAW)
    return lambda: os.open(path, os.O_RDONLY)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != unpack.MADE)


def test_first_node_makes_the_folder_and_the_next_one_keeps_it(
    archive: Callable[[], int], tmp_path: Path
) -> None:
    final = tmp_path / ".shared/att_2"
    unpack.make(archive(), DIGEST, str(final))
    assert names(final) == ["data", "data/x.txt", "train.py"]
    (final / "from_rank_0").write_text("y")
    (final / "train.py").write_text("changed")
    unpack.make(archive(), DIGEST, str(final))
    assert (final / "from_rank_0").read_text() == "y"
    assert (final / "train.py").read_text() == "changed"
    assert [path.name for path in final.parent.iterdir()] == ["att_2"]


def test_nodes_that_make_it_at_once_share_one_folder_and_leave_nothing_else(
    archive: Callable[[], int], tmp_path: Path
) -> None:
    final = tmp_path / ".shared/att_2"
    begin = multiprocessing.get_context("fork").Barrier(6)

    def node() -> None:
        begin.wait()
        unpack.make(archive(), DIGEST, str(final))
        inode = final.stat().st_ino
        (final / f"by-{os.getpid()}").write_text(str(inode))

    nodes = [multiprocessing.get_context("fork").Process(target=node) for _ in range(6)]
    for process in nodes:
        process.start()
    for process in nodes:
        process.join()
        assert process.exitcode == 0
    marks = list(final.glob("by-*"))
    assert len(marks) == 6  # no node wrote into a folder that another one removed
    assert {int(mark.read_text()) for mark in marks} == {final.stat().st_ino}
    assert [path.name for path in final.parent.iterdir()] == ["att_2"]


def test_node_that_died_while_unpacking_leaves_no_half_folder(
    archive: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / ".shared/att_2"

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", die)
        patch.setattr(removal, "remove", lambda *_, **__: False)
        with pytest.raises(KeyboardInterrupt):
            unpack.make(archive(), DIGEST, str(final))
    assert not final.exists()
    unpack.make(archive(), DIGEST, str(final))
    assert names(final) == ["data", "data/x.txt", "train.py"]
    unpack.make(archive(), DIGEST, str(tmp_path / ".shared/att_3"))  # the next attempt's clears up
    assert [path.name for path in final.parent.iterdir()] == ["att_3"]


def test_late_older_attempt_removes_nothing_of_the_newer(archive: Callable[[], int], tmp_path: Path) -> None:
    new, old = tmp_path / ".shared/att_3", tmp_path / ".shared/att_2"
    unpack.make(archive(), DIGEST, str(new))
    (new / "result").write_text("r")
    unpack.make(archive(), DIGEST, str(old))
    (old / "train.py").write_text("stale")
    assert (new / "result").read_text() == "r"
    assert (new / "train.py").read_bytes() == b"print()\n"


def test_folder_is_made_without_an_archive_too(tmp_path: Path) -> None:
    unpack.make(None, None, str(tmp_path / ".shared/att_1"))
    assert names(tmp_path / ".shared/att_1") == []


def test_rename_that_succeeded_but_was_reported_as_failed_counts(
    archive: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def twice(old: str, new: str) -> None:
        rename(old, new)
        raise FileNotFoundError(errno.ENOENT, "as a repeated NFS request says")

    monkeypatch.setattr(os, "rename", twice)
    unpack.make(archive(), DIGEST, str(tmp_path / ".shared/att_1"))


def test_file_in_place_of_the_folder_is_named(archive: Callable[[], int], tmp_path: Path) -> None:
    (tmp_path / ".shared").mkdir()
    (tmp_path / ".shared/att_1").write_text("a file")
    with pytest.raises(SpecError, match="cannot be made"):
        unpack.make(archive(), DIGEST, str(tmp_path / ".shared/att_1"))
