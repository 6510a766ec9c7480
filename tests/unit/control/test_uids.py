"""Users of projects: no two homes on a machine have the same, and no user can become one by `newuidmap`."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shoal.control import project_uids
from shoal.control.project_uids import (
    BLOCK,
    NUM_BLOCKS,
    blocks,
    claim_block,
    keep_blocks,
    overlapping,
    subordinate_ranges,
    usable_uid,
)
from shoal.local_sockets import FIRST_PROJECT_UID

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root's homes are noted")
FOREIGN = 2_147_352_576


def homes(tmp_path: Path, *names: str) -> list[Path]:
    folders = [tmp_path / name for name in names]
    for folder in folders:
        folder.mkdir()
    return folders


def test_every_block_lies_between_containers_and_foreign_ids() -> None:
    assert FIRST_PROJECT_UID > 1_879_048_191
    assert FIRST_PROJECT_UID + NUM_BLOCKS * BLOCK < FOREIGN
    assert len({*blocks("a")}) == NUM_BLOCKS


def test_block_that_overlaps_a_subordinate_range_is_passed_over(tmp_path: Path) -> None:
    wanted, second = islice(blocks("a"), 2)
    file = tmp_path / "subuid"
    file.write_text(f"ana:100000:65536\nbroken line\nbob:{wanted + BLOCK - 1}:1\n")
    taken = tuple(subordinate_ranges((file, tmp_path / "missing")))
    assert next(blocks("a", taken)) == second
    assert overlapping(wanted + 7, taken) == range(wanted + BLOCK - 1, wanted + BLOCK)
    assert overlapping(second + 7, taken) is None


def test_block_in_which_the_home_has_a_project_already_is_passed_over(tmp_path: Path) -> None:
    (home,) = homes(tmp_path, "home")
    wanted = claim_block(home, "a", tmp_path / "uids")
    assert claim_block(home, "a", tmp_path / "uids", used=[wanted + 7]) != wanted


def note(name: str, home: Path) -> str:
    return f"{name}\n{home}\n{home.parent.stat().st_dev}\n"


def named(number: int) -> Callable[[int], None]:
    """As `pwd.getpwuid` if only this number has a name."""

    def find(wanted: int) -> None:
        if wanted != number:
            raise KeyError(wanted)

    return find


@pytest.mark.parametrize("database", ["pwd.getpwuid", "grp.getgrgid"])
def test_uid_of_an_account_or_a_group_goes_to_no_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: str
) -> None:
    (home,) = homes(tmp_path, "home")
    monkeypatch.setattr(project_uids, "REGISTRY", tmp_path / "uids")
    first, second, third = islice(blocks("a"), 3)
    monkeypatch.setattr(database, named(first + 7))
    assert claim_block(home, "a", wanted=7) == first
    assert claim_block(home, "a", wanted=8) == second
    assert usable_uid(first + 6, home, "a", [first]) == first + 6
    assert usable_uid(first + 7, home, "a", [first]) == second
    monkeypatch.setattr(database, named(second))
    assert usable_uid(second, home, "a", [first]) == third


def test_new_project_is_not_in_a_subordinate_range_that_came_after_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home,) = homes(tmp_path, "home")
    monkeypatch.setattr(project_uids, "REGISTRY", tmp_path / "uids")
    first, second = islice(blocks("a"), 2)
    assert usable_uid(first + 7, home, "a", [first]) == first + 7
    monkeypatch.setattr(project_uids, "subordinate_ranges", lambda: iter([range(first + 9, first + 10)]))
    assert usable_uid(first + 7, home, "a", [first]) == second


def test_project_after_the_last_one_of_a_block_is_not_in_the_block_of_another_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home,) = homes(tmp_path, "home")
    monkeypatch.setattr(project_uids, "REGISTRY", tmp_path / "uids")
    first, second = islice(blocks("a"), 2)
    last = second + BLOCK - 1
    assert usable_uid(last, home, "a", [last - 1]) == last
    assert usable_uid(last + 1, home, "a", [last]) == first


@needs_root
def test_two_homes_that_want_one_block_get_two_and_keep_them(tmp_path: Path) -> None:
    first, second = homes(tmp_path, "first", "second")
    registry = tmp_path / "uids"
    block = claim_block(first, "same", registry)
    (registry / str(block)).write_text(note("other", first))  # as if the first home's id were another
    two = claim_block(second, "same", registry)
    assert block != two
    assert claim_block(second, "same", registry) == two


@needs_root
def test_block_of_a_home_that_was_removed_is_given_again(tmp_path: Path) -> None:
    first, second = homes(tmp_path, "first", "second")
    registry = tmp_path / "uids"
    block = claim_block(first, "same", registry)
    (registry / str(block)).write_text(note("other", first))
    first.rmdir()
    assert claim_block(second, "same", registry) == block


@needs_root
def test_home_whose_file_system_is_not_mounted_keeps_its_block(tmp_path: Path) -> None:
    mounted, other = homes(tmp_path, "mounted", "other")
    registry = tmp_path / "uids"
    block = claim_block(mounted, "same", registry)
    elsewhere = note("other", mounted).replace(str(tmp_path.stat().st_dev), "1")
    mounted.rmdir()
    for text in (elsewhere, f"other\n{tmp_path}/srv/not-mounted/home\n1\n"):
        (registry / str(block)).write_text(text)
        assert claim_block(other, "same", registry) != block


@needs_root
def test_each_note_is_read_in_the_end_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(project_uids, "MAX_NOTES_READ", 2)
    (home,) = homes(tmp_path, "home")
    registry = tmp_path / "uids"
    registry.mkdir()
    for number in range(5):
        (registry / str(number)).write_text(note("gone", tmp_path / "gone"))
    for _ in range(200):
        claim_block(home, "a", registry)
    assert len(list(registry.iterdir())) == 1


@needs_root
def test_home_that_was_moved_keeps_its_block(tmp_path: Path) -> None:
    first, other = homes(tmp_path, "first", "other")
    registry = tmp_path / "uids"
    block = claim_block(first, "same", registry)
    moved = first.rename(tmp_path / "moved")
    assert keep_blocks([block + 7], moved, "same", registry) == []
    claim_block(other, "other", registry)  # gives back the blocks of homes that are gone
    assert (registry / str(block)).read_text() == note("same", moved)


@needs_root
def test_home_that_was_restored_on_another_machine_has_its_block_there(tmp_path: Path) -> None:
    restored, other = homes(tmp_path, "restored", "other")
    block = claim_block(restored, "same", tmp_path / "old")
    registry = tmp_path / "new"
    assert keep_blocks([block], restored, "same", registry) == []
    assert keep_blocks([block, block + 7], other, "another", registry) == [block, block + 7]
    assert {*registry.iterdir()} == {registry / str(block)}


@needs_root
def test_home_starts_although_no_uid_can_be_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (home,) = homes(tmp_path, "home")
    monkeypatch.setattr(Path, "write_text", full)
    with capture_logs() as logs:
        first = claim_block(home, "same", tmp_path / "uids")
        assert keep_blocks([first + 7], home, "same", tmp_path / "uids") == []
    assert first == next(blocks("same", tuple(subordinate_ranges())))
    assert [entry["event"] for entry in logs] == ["uids.not_noted"] * 2
