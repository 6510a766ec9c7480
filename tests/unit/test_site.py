"""How a home is distinguished from a copy of it on different file systems."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from shoal import home_identity
from shoal.home_identity import DirectoryId, identify, is_same

replace = msgspec.structs.replace
DISK, OTHER_DISK = os.makedev(8, 1), os.makedev(8, 2)
UNNUMBERED, REMOUNTED = os.makedev(0, 40), os.makedev(0, 41)


def a_directory(**changes: object) -> DirectoryId:
    directory = DirectoryId(path="/h", inode=7, device=DISK, boot_id="b1", handle="1:aa", machine="m")
    return replace(directory, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"path": "/renamed"},
        {"boot_id": "b2", "device": OTHER_DISK},  # disks get new numbers at a restart
        {"device": REMOUNTED},
        {"handle": ""},
        {"volume": "2b"},  # not recorded before: an older record, or another file system
        {"handle": "129:bb"},  # seen through NFS by one machine, and not by the other
    ],
)
def test_same_directory_is_recognized(changes: dict[str, object]) -> None:
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
        {"device": UNNUMBERED, "volume": "2b"},  # a clone of a ZFS dataset, beside its original
    ],
)
def test_copy_of_a_home_is_distinguished_from_the_original(changes: dict[str, object]) -> None:
    assert not is_same(a_directory(volume="1a"), a_directory(**{"volume": "1a", **changes}))


def test_reattached_disk_is_recognized_by_its_own_name() -> None:
    before = a_directory(disk="naa.5001#1")
    assert is_same(before, replace(before, device=OTHER_DISK))
    for disk in ("naa.5002#1", "naa.5001#2", ""):
        assert not is_same(before, replace(before, device=OTHER_DISK, disk=disk))
    assert not is_same(before, replace(before, device=OTHER_DISK, inode=8))
    assert not is_same(before, replace(before, device=OTHER_DISK, handle="1:bb"))
    nameless = a_directory()
    assert not is_same(nameless, replace(nameless, device=OTHER_DISK))


def sysfs(place: Path, files: dict[str, str]) -> Path:
    """Device 8:1 as /sys/dev/block has it: a link to the partition's directory, in that of its disk."""
    partition = place / "devices" / "sda" / "sda1"
    partition.mkdir(parents=True)
    for name, text in files.items():
        (partition / name).resolve().parent.mkdir(parents=True, exist_ok=True)
        (partition / name).resolve().write_text(f"{text}\n")
    (place / "block").mkdir()
    (place / "block" / "8:1").symlink_to(partition)
    return place / "block"


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ({"partition": "1", "../device/wwid": "naa.5001"}, "naa.5001#1"),
        ({"partition": "2", "../wwid": "nvme.1d0f-766f6c"}, "nvme.1d0f-766f6c#2"),
        ({"wwid": "eui.0025"}, "eui.0025#0"),
        ({"dm/uuid": "LVM-group-volume"}, "LVM-group-volume"),
        ({"dm/uuid": "CRYPT-LUKS2-image-home"}, ""),  # an image of the disk has it, too
        ({"serial": "data"}, ""),  # given by the machine's configuration
        ({}, ""),
    ],
)
def test_name_of_a_disk_is_one_that_no_other_disk_has(
    tmp_path: Path, files: dict[str, str], name: str
) -> None:
    assert home_identity.disk_name(DISK, sysfs(tmp_path, files)) == name


def test_device_that_is_no_disk_has_no_name(tmp_path: Path) -> None:
    assert home_identity.disk_name(UNNUMBERED, tmp_path) == ""


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
    there = home_identity.HomeIdentity(
        site_id="x", directory=replace(here, machine="m1", boot_id="b", device=0)
    )
    (tmp_path / home_identity.FILE).write_bytes(home_identity.encode_record(there))
    is_known = bool(here.machine)
    assert home_identity.is_copy(tmp_path, is_bound_to_machine=True) == is_known
    assert not home_identity.is_copy(tmp_path, is_bound_to_machine=False)
