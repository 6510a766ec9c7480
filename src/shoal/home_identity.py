"""The identity of a SHOAL_HOME directory, which tells a home from a copy of it.

A home keeps records of running jobs in files, and files can be copied while jobs run. So a home records which
directory it is, in a form that a copy cannot share. A control plane compares this record with the directory
before it acts on anything. Renaming the directory, a bind mount and a restart of the machine do not change
the identity.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from pathlib import Path
from typing import TypeVar

import msgspec

from shoal.errors import StateError

T = TypeVar("T")

FILE = "site.json"
REQUEST = "restore.json"
BOOT_ID = "/proc/sys/kernel/random/boot_id"
MACHINE_ID = "/etc/machine-id"
CURRENT_DIRECTORY = -100
FOLLOW_LINKS = 0x400
MAX_HANDLE = 128
WITHOUT_INODES = ("fuse", "9p", "virtiofs")
"""File systems that may number a directory differently after each mount."""
WITH_VOLUME_IDS = ("zfs", "btrfs")
"""File systems whose f_fsid (statfs(2)) names a dataset or subvolume, and stays through a remount and a
restart. A clone has another one, but the inodes and handles of its original. XFS and others derive f_fsid
from the number of the device, tmpfs draws one for each mount, and NFS has none.
"""
BLOCK_DEVICES = Path("/sys/dev/block")
DISK_NAMES = ("uuid.", "eui.", "naa.", "nvme.", "t10.")
"""Prefixes of names that a disk has from its maker or its cloud. No two attached disks share such a name. The
serial of a virtio disk does not count, because the configuration of its machine chooses it.
"""
VOLUME_NAMES = ("LVM-", "mpath-")
"""Prefixes of names in the device mapper. A snapshot of a logical volume has a name of its own."""


class CopiedHome(StateError):
    """The home is a copy, and jobs in its records may run under the original."""

    code = "home.copied"


class DirectoryId(msgspec.Struct, frozen=True, kw_only=True):
    """One directory of one file system. Compare with `is_same`."""

    path: str
    inode: int
    device: int
    boot_id: str
    """`device` is valid until the machine restarts."""
    handle: str = ""
    """The file system's own name for the directory (name_to_handle_at(2)), with a number that no two
    directories ever share. Empty if the file system has none."""
    has_inode: bool = True
    machine: str = ""
    disk: str = ""
    """The disk's own name and the partition on it. Empty: the disk has no unique name."""
    volume: str = ""
    """The file system's own id of its dataset or subvolume. Empty if it has none that lasts."""


class HomeIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The identity that a home records. A restored copy gets a new `site_id`."""

    site_id: str
    directory: DirectoryId


class RestoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's permission for a copy to become a home of its own."""

    runs_again: bool
    """Whether open jobs start again here. Otherwise they end here."""
    directory: DirectoryId
    """The directory for which the permission was given. It does not hold in a copy of that directory."""
    site_id: str
    """The new id of the copy. The request contains it, so that carrying it out twice changes nothing."""


class _Handle(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_uint),
        ("kind", ctypes.c_int),
        ("data", ctypes.c_ubyte * MAX_HANDLE),
    )


def identify(path: Path) -> DirectoryId:
    """Return the identity of a directory. `OSError`: the directory cannot be read."""
    real = path.resolve(strict=True)
    facts = real.stat()
    kind = _kind_of(facts.st_dev)
    return DirectoryId(
        path=str(real),
        inode=facts.st_ino,
        device=facts.st_dev,
        boot_id=_read(BOOT_ID),
        handle=_handle(real),
        has_inode=not kind.startswith(WITHOUT_INODES),
        machine=_read(MACHINE_ID),
        disk=disk_name(facts.st_dev),
        volume=f"{os.statvfs(real).f_fsid:x}" if kind in WITH_VOLUME_IDS else "",
    )


def is_same(recorded: DirectoryId, current: DirectoryId) -> bool:
    """Whether both are the same directory, even if it was renamed or mounted elsewhere in between.

    A snapshot of a file system that has neither a device of its own nor an id for each of its volumes passes
    for its original, for instance one that a file server has cloned and exports over NFS.
    """
    if not (recorded.has_inode and current.has_inode):
        return recorded.path == current.path and recorded.machine == current.machine
    if recorded.inode != current.inode:
        return False
    if recorded.volume and current.volume and recorded.volume != current.volume:
        return False
    kinds = {one.handle.partition(":")[0] for one in (recorded, current) if one.handle}
    if recorded.handle and current.handle and len(kinds) == 1 and recorded.handle != current.handle:
        return False
    # Two images of one disk have equal inodes and handles. While both are mounted, their devices differ.
    # A device without a major number gets a new number with each mount: btrfs, NFS, overlayfs.
    is_telling = (
        recorded.boot_id == current.boot_id and os.major(recorded.device) and os.major(current.device)
    )
    # A disk that was detached and attached again may have another number and is still the same disk.
    is_same_disk = bool(recorded.disk) and recorded.disk == current.disk
    return not is_telling or recorded.device == current.device or is_same_disk


def disk_name(device: int, devices: Path = BLOCK_DEVICES) -> str:
    """Return the unique name of a disk and its partition, or an empty string if it has none."""
    place = devices / f"{os.major(device)}:{os.minor(device)}"
    volume = _read(str(place / "dm" / "uuid"))
    if volume.startswith(VOLUME_NAMES):
        return volume
    partition = _read(str(place / "partition"))
    with contextlib.suppress(OSError):
        disk = place.resolve(strict=True).parent if partition else place
        for name in (_read(str(disk / "wwid")), _read(str(disk / "device" / "wwid"))):
            if name.startswith(DISK_NAMES):
                return f"{name}#{partition or 0}"
    return ""


def read_identity(home: Path) -> HomeIdentity | None:
    """Return the identity that the home has recorded. None: it has recorded none."""
    return _decoded(home / FILE, HomeIdentity)


def read_request(home: Path) -> RestoreRequest | None:
    """Return the operator's request if it is for this very directory and still has to be carried out."""
    request = _decoded(home / REQUEST, RestoreRequest)
    if request is None or not is_same(request.directory, identify(home)):
        return None
    return request


def encode_record(record: HomeIdentity | RestoreRequest) -> bytes:
    return msgspec.json.encode(record)


def has_been_used(home: Path) -> bool:
    """Whether a database was ever bound to the home."""
    return (home / "home-id").exists()


def is_copy(home: Path, *, is_bound_to_machine: bool) -> bool:
    """Whether the home has been used, but as another directory.

    `is_bound_to_machine`: the jobs run on the machine itself. Then the same directory on another machine (a
    disk that was moved, a file system that two machines mount) counts as a copy.
    """
    if not has_been_used(home):
        return False
    site = read_identity(home)
    if site is None:
        return True
    current = identify(home)
    machine = site.directory.machine
    has_moved = is_bound_to_machine and machine and current.machine and machine != current.machine
    return bool(has_moved) or not is_same(site.directory, current)


def refuse_copy(home: Path, *, is_bound_to_machine: bool) -> None:
    """Raise `CopiedHome` if the home is a copy and the operator has not requested a restore."""
    if not is_copy(home, is_bound_to_machine=is_bound_to_machine) or read_request(home) is not None:
        return
    site = read_identity(home)
    origin = "a copy, a restored backup, or a home that an older Shoal used"
    if site is not None:
        origin = f"a copy of {site.directory.path}"
    raise CopiedHome(
        f"{home} is {origin}: jobs that its records call open may run under the original",
        hint="to make the copy a home of its own, `shoal up --restored`: its open jobs end here, and `shoal "
        "retry` begins one again. If the original is gone for good, `shoal up --restored --rerun` begins all "
        "of them again",
    )


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="ascii", errors="replace").strip()
    return ""


def _decoded(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise StateError(
            f"{path} cannot be read: {error}",
            hint=f"`mv {path} {path}.bad`, then `shoal up` says what it takes this home for",
        ) from error


def _handle(path: Path) -> str:
    """Return the file handle, or an empty string if the file system, or a container's filter, gives none."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle, mount = _Handle(size=MAX_HANDLE), ctypes.c_int()
    try:
        ask = libc.name_to_handle_at
    except AttributeError:
        return ""
    name = os.fsencode(path)
    if ask(CURRENT_DIRECTORY, name, ctypes.byref(handle), ctypes.byref(mount), FOLLOW_LINKS) != 0:
        if ctypes.get_errno() == errno.ENOENT:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return ""
    return f"{handle.kind}:{bytes(handle.data[: handle.size]).hex()}"


def _kind_of(device: int) -> str:
    """Return the type of the file system with that device from /proc/self/mountinfo, or an empty string."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in _read("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[2:3] == [number]:
            return right.split()[0]
    return ""
