"""Which directory a home is: tells a home from a copy of it.

A home remembers what runs by files, and files can be copied while jobs run. So a home records which directory
it is, in a form that a copy of the file cannot share, and a control plane compares the two before it acts on
anything. A renamed directory, a bind mount and a restart of the machine leave the identity as it was.
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
BLOCK_DEVICES = Path("/sys/dev/block")
DISK_NAMES = ("uuid.", "eui.", "naa.", "nvme.", "t10.")
"""How names begin that a disk has from its maker or its cloud. No two attached disks share such a name.
The serial of a virtio disk does not count: it is whatever the configuration of its machine says.
"""
VOLUME_NAMES = ("LVM-", "mpath-")
"""Names of the device mapper. A snapshot of a logical volume has one of its own."""


class CopiedHome(StateError):
    """The home is a copy, and what its records name may run under the original."""

    code = "home.copied"


class DirectoryId(msgspec.Struct, frozen=True, kw_only=True):
    """One directory of one file system. Compare with `is_same`."""

    path: str
    inode: int
    device: int
    boot_id: str
    """`device` means something until the machine restarts."""
    handle: str = ""
    """The file system's own name for the directory (name_to_handle_at(2)), with a number that is new for each
    directory ever made. Empty where the file system has none."""
    has_inode: bool = True
    machine: str = ""
    disk: str = ""
    """The disk's own name, and the partition on it. Empty: another disk could have its name."""


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """What a home records of itself. A restored copy gets a new `site_id`."""

    site_id: str
    directory: DirectoryId


class RestoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's word that a copy may become a home of its own."""

    runs_again: bool
    """Whether open jobs begin again here; else they end here."""
    directory: DirectoryId
    """Where the word was given: it does not count in a further copy."""
    site_id: str
    """What the copy becomes. It is chosen with the word, so that carrying it out twice changes nothing."""


class _Handle(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_uint),
        ("kind", ctypes.c_int),
        ("data", ctypes.c_ubyte * MAX_HANDLE),
    )


def identify(path: Path) -> DirectoryId:
    """What tells this directory from every other one. `OSError`: it cannot be looked at."""
    real = path.resolve(strict=True)
    facts = real.stat()
    return DirectoryId(
        path=str(real),
        inode=facts.st_ino,
        device=facts.st_dev,
        boot_id=_read(BOOT_ID),
        handle=_handle(real),
        has_inode=not _kind_of(facts.st_dev).startswith(WITHOUT_INODES),
        machine=_read(MACHINE_ID),
        disk=disk_name(facts.st_dev),
    )


def is_same(recorded: DirectoryId, found: DirectoryId) -> bool:
    """Whether both are one directory, though it may have been renamed or mounted elsewhere since."""
    if not (recorded.has_inode and found.has_inode):
        return recorded.path == found.path and recorded.machine == found.machine
    if recorded.inode != found.inode:
        return False
    kinds = {one.handle.partition(":")[0] for one in (recorded, found) if one.handle}
    if recorded.handle and found.handle and len(kinds) == 1 and recorded.handle != found.handle:
        return False
    # Two images of one disk have equal inodes and handles. While both are mounted, their devices differ.
    # A device without a major number is numbered anew with each mount: btrfs, NFS, overlayfs.
    is_telling = recorded.boot_id == found.boot_id and os.major(recorded.device) and os.major(found.device)
    # A disk that was taken off and attached again may have another number, and is the same disk.
    is_same_disk = bool(recorded.disk) and recorded.disk == found.disk
    return not is_telling or recorded.device == found.device or is_same_disk


def disk_name(device: int, devices: Path = BLOCK_DEVICES) -> str:
    """Return what tells a disk and its partition from all others that are attached; empty: nothing does."""
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


def read_site(home: Path) -> Site | None:
    """What the home recorded of itself; None: nothing yet."""
    return _decoded(home / FILE, Site)


def read_request(home: Path) -> RestoreRequest | None:
    """The operator's word, if it was given for this very directory and was not carried out yet."""
    request = _decoded(home / REQUEST, RestoreRequest)
    if request is None or not is_same(request.directory, identify(home)):
        return None
    return request


def encoded(record: Site | RestoreRequest) -> bytes:
    return msgspec.json.encode(record)


def has_been_used(home: Path) -> bool:
    """Whether a database was ever tied to it."""
    return (home / "home-id").exists()


def is_copy(home: Path, *, is_bound_to_machine: bool) -> bool:
    """Whether the home has a past, and that past is another directory's.

    `is_bound_to_machine`: its jobs run on the machine itself, so the same directory on another machine (a
    disk that was moved, a file system that two machines mount) says nothing about what runs.
    """
    if not has_been_used(home):
        return False
    site = read_site(home)
    if site is None:
        return True
    found = identify(home)
    known = site.directory.machine
    has_moved = is_bound_to_machine and known and found.machine and known != found.machine
    return bool(has_moved) or not is_same(site.directory, found)


def refuse_copy(home: Path, *, is_bound_to_machine: bool) -> None:
    """`CopiedHome` where the home is a copy, unless the operator said what becomes of it."""
    if not is_copy(home, is_bound_to_machine=is_bound_to_machine) or read_request(home) is not None:
        return
    site = read_site(home)
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
    """Empty: the file system has none, or a container's filter forbids to ask."""
    libc = ctypes.CDLL(None, use_errno=True)
    found, mount = _Handle(size=MAX_HANDLE), ctypes.c_int()
    try:
        ask = libc.name_to_handle_at
    except AttributeError:
        return ""
    name = os.fsencode(path)
    if ask(CURRENT_DIRECTORY, name, ctypes.byref(found), ctypes.byref(mount), FOLLOW_LINKS) != 0:
        if ctypes.get_errno() == errno.ENOENT:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return ""
    return f"{found.kind}:{bytes(found.data[: found.size]).hex()}"


def _kind_of(device: int) -> str:
    """The name of the file system with that device, as /proc/self/mountinfo has it; empty: not listed."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in _read("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[2:3] == [number]:
            return right.split()[0]
    return ""
