"""What tells a home from a copy of it, whatever the file system says of either."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from shoal import site
from shoal.site import DirectoryId, identify, is_same

replace = msgspec.structs.replace
DISK, OTHER_DISK = os.makedev(8, 1), os.makedev(8, 2)
UNNUMBERED, REMOUNTED = os.makedev(0, 40), os.makedev(0, 41)


def a_directory(**changes: object) -> DirectoryId:
    known = DirectoryId(path="/h", inode=7, device=DISK, boot_id="b1", handle="1:aa", machine="m")
    return replace(known, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"path": "/renamed"},
        {"boot_id": "b2", "device": OTHER_DISK},  # disks are numbered anew by a restart
        {"device": REMOUNTED},
        {"handle": ""},
        {"handle": "129:bb"},  # seen through NFS by one machine, and not by the other
    ],
)
def test_the_same_directory_is_known_again(changes: dict[str, object]) -> None:
    before = a_directory(device=UNNUMBERED) if changes.get("device") == REMOUNTED else a_directory()
    assert is_same(before, replace(before, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"inode": 8},
        {"handle": "1:bb"},  # the number was given to another directory, or it is a snapshot
        {"device": OTHER_DISK},  # an image of the disk, mounted beside it
        {"path": "/copy", "has_inode": False},
        {"machine": "n", "has_inode": False},
    ],
)
def test_a_copy_is_told_from_the_original(changes: dict[str, object]) -> None:
    assert not is_same(a_directory(), a_directory(**changes))


def test_a_copied_and_a_renamed_directory_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    before = identify(tmp_path / "home")
    shutil.copytree(tmp_path / "home", tmp_path / "copy")
    assert not is_same(before, identify(tmp_path / "copy"))
    (tmp_path / "home").rename(tmp_path / "renamed")
    assert is_same(before, identify(tmp_path / "renamed"))
    (tmp_path / "link").symlink_to(tmp_path / "renamed")
    assert is_same(before, identify(tmp_path / "link"))


def test_a_home_on_another_machine_is_a_copy_only_where_its_jobs_run_on_the_machine(tmp_path: Path) -> None:
    (tmp_path / "home-id").touch()
    here = identify(tmp_path)
    there = site.Site(site_id="x", directory=replace(here, machine="m1", boot_id="b", device=0))
    (tmp_path / site.FILE).write_bytes(site.encoded(there))
    is_known = bool(here.machine)
    assert site.is_copy(tmp_path, is_bound_to_machine=True) == is_known
    assert not site.is_copy(tmp_path, is_bound_to_machine=False)
