"""One working folder for all nodes of an attempt: made once, whoever is first, whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.errors import SpecError
from shoal.runtime import removal, shared_folder
from tests.support.archives import tar_of

RAW = tar_of({"train.py": b"print()\n", "data/x.txt": b"x"})
DIGEST = hashlib.sha256(RAW).hexdigest()


@pytest.fixture
def archive(tmp_path: Path) -> Callable[[], int]:
    """Opens it, as each node does for itself."""
    path = tmp_path / "archive.tar"
    path.write_bytes(RAW)
    return lambda: os.open(path, os.O_RDONLY)


def names(folder: Path) -> list[str]:
    return sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != shared_folder.MADE
    )


def test_the_first_node_makes_it_and_the_next_finds_it_as_it_is(
    archive: Callable[[], int], tmp_path: Path
) -> None:
    final = tmp_path / ".shared/att_2"
    shared_folder.make(archive(), DIGEST, str(final))
    assert names(final) == ["data", "data/x.txt", "train.py"]
    (final / "from_rank_0").write_text("y")
    (final / "train.py").write_text("changed")
    shared_folder.make(archive(), DIGEST, str(final))
    assert (final / "from_rank_0").read_text() == "y"
    assert (final / "train.py").read_text() == "changed"
    assert [path.name for path in final.parent.iterdir()] == ["att_2"]


def test_nodes_that_make_it_at_once_have_one_folder_and_leave_nothing(
    archive: Callable[[], int], tmp_path: Path
) -> None:
    final = tmp_path / ".shared/att_2"
    begin = multiprocessing.get_context("fork").Barrier(6)

    def node() -> None:
        begin.wait()
        shared_folder.make(archive(), DIGEST, str(final))
        inode = final.stat().st_ino
        (final / f"by-{os.getpid()}").write_text(str(inode))

    nodes = [multiprocessing.get_context("fork").Process(target=node) for _ in range(6)]
    for one in nodes:
        one.start()
    for one in nodes:
        one.join()
        assert one.exitcode == 0
    marks = list(final.glob("by-*"))
    assert len(marks) == 6  # nobody wrote into a folder that another took away
    assert {int(mark.read_text()) for mark in marks} == {final.stat().st_ino}
    assert [path.name for path in final.parent.iterdir()] == ["att_2"]


def test_a_node_that_died_while_it_unpacked_leaves_no_half_folder(
    archive: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / ".shared/att_2"

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", die)
        patch.setattr(removal, "remove", lambda *_, **__: False)
        with pytest.raises(KeyboardInterrupt):
            shared_folder.make(archive(), DIGEST, str(final))
    assert not final.exists()
    shared_folder.make(archive(), DIGEST, str(final))
    assert names(final) == ["data", "data/x.txt", "train.py"]
    shared_folder.make(archive(), DIGEST, str(tmp_path / ".shared/att_3"))  # the next attempt's clears up
    assert [path.name for path in final.parent.iterdir()] == ["att_3"]


def test_an_older_attempt_that_comes_late_takes_nothing_from_the_newer(
    archive: Callable[[], int], tmp_path: Path
) -> None:
    new, old = tmp_path / ".shared/att_3", tmp_path / ".shared/att_2"
    shared_folder.make(archive(), DIGEST, str(new))
    (new / "result").write_text("r")
    shared_folder.make(archive(), DIGEST, str(old))
    (old / "train.py").write_text("stale")
    assert (new / "result").read_text() == "r"
    assert (new / "train.py").read_bytes() == b"print()\n"


def test_without_files_it_is_there_all_the_same(tmp_path: Path) -> None:
    shared_folder.make(None, None, str(tmp_path / ".shared/att_1"))
    assert names(tmp_path / ".shared/att_1") == []


def test_a_rename_that_was_done_and_told_as_failed_is_one_that_was_done(
    archive: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def twice(old: str, new: str) -> None:
        rename(old, new)
        raise FileNotFoundError(errno.ENOENT, "as a repeated NFS request says")

    monkeypatch.setattr(os, "rename", twice)
    shared_folder.make(archive(), DIGEST, str(tmp_path / ".shared/att_1"))


def test_what_is_in_its_place_is_told(archive: Callable[[], int], tmp_path: Path) -> None:
    (tmp_path / ".shared").mkdir()
    (tmp_path / ".shared/att_1").write_text("a file")
    with pytest.raises(SpecError, match="cannot be made"):
        shared_folder.make(archive(), DIGEST, str(tmp_path / ".shared/att_1"))
