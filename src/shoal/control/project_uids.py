"""Choose the Unix users of a home's projects: a block of uids that no other home on this machine has.

Blocks lie above the subordinate ids that `useradd` hands out (to 600,100,000 by default) and above containers
of systemd (to 1,879,048,191), and below its foreign ids (from 2,147,352,576). A home's block follows from its
name in the register, so two homes seldom want the same block, even if their machines share a file system. A
home and its restored copy have two names.

Also give the files that jobs left in a copied home to the users that their projects have in the copy.
"""

from __future__ import annotations

import contextlib
import grp
import hashlib
import os
import pwd
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import structlog

from shoal.errors import StateError
from shoal.local_sockets import FIRST_PROJECT_UID
from shoal.model.people import Project

BLOCK = 4_096
NUM_BLOCKS = 60_000
"""The last block ends at 2,145,760,000."""
MAX_NOTES_READ = 200
SUBORDINATE = (Path("/etc/subuid"), Path("/etc/subgid"))
REGISTRY = Path("/var/lib/shoal/uids")
"""On each machine: one file for each block that a home of root's has. The name of the file is the first uid.
The file holds the home's name in the register, the home's path, and the device of the folder above it.
"""

log = structlog.get_logger()


def claim_block(
    home: Path, name: str, registry: Path | None = None, used: Collection[int] = (), wanted: int = 1
) -> int:
    """Return the first uid of this home's block, which no other home on this machine gets from now on.

    May be repeated: a home keeps its block. Without root nothing is noted, because no job runs as another
    user. `used`: uids that the home's projects already have. A block with one of them is passed over. A block
    is also passed over if an account or a group of this machine has one of its first `wanted` uids.
    """
    registry = registry or REGISTRY
    if os.geteuid() == 0:
        _forget_gone(registry)
    taken = (*subordinate_ranges(), *(range(uid, uid + 1) for uid in used))
    for first in blocks(name, taken):
        if any(map(is_in_use, range(first, first + wanted))):
            continue
        if os.geteuid() != 0 or _is_noted(registry, first, home, name):
            return first
    raise StateError(
        "every block of users for projects is taken on this machine",
        hint=f"remove the files in {registry} of homes that are gone",
    )


def usable_uid(uid: int, home: Path, name: str, used: Collection[int]) -> int:
    """Return this uid for a new project, or the first uid of another block if the home no longer owns this
    one alone: an account, a group or a subordinate range has taken it, or it lies in the next home's block.

    Blocks, because it asks the system for accounts. `used`: uids of the home's projects.
    """
    is_past_block = uid == first_of(uid) and uid - 1 in used
    if is_past_block or is_in_use(uid) or overlapping(uid, tuple(subordinate_ranges())) is not None:
        return claim_block(home, name, used={*used, uid})
    return uid


def keep_blocks(
    uids: Collection[int], home: Path, name: str, registry: Path | None = None, *, is_heir: bool = False
) -> list[int]:
    """Note the path of the home whose projects have these uids. The home may have been moved, or restored
    here.

    Return those uids that lie in blocks of another home on this machine. The notes of these blocks stay as
    they are. `is_heir`: the other home is gone for good, so its blocks become this home's.
    """
    if os.geteuid() != 0:
        return []
    registry = registry or REGISTRY
    _forget_gone(registry)
    firsts = {first_of(uid) for uid in uids}
    kept = {first for first in firsts if _is_noted(registry, first, home, name, is_heir=is_heir)}
    return sorted(uid for uid in uids if first_of(uid) not in kept)


def blocks(name: str, taken: Collection[range] = ()) -> Iterator[int]:
    """Yield the first uids of the blocks that the home may have, the preferred one first. Pure."""
    begin = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    for number in range(NUM_BLOCKS):
        first = FIRST_PROJECT_UID + (begin + number) % NUM_BLOCKS * BLOCK
        if overlapping(first, taken) is None:
            yield first


def overlapping(uid: int, taken: Collection[range]) -> range | None:
    """Return a range of subordinate ids that contains part of the uid's block."""
    first = first_of(uid)
    return next(
        (
            taken_range
            for taken_range in taken
            if taken_range.start < first + BLOCK and first < taken_range.stop
        ),
        None,
    )


def first_of(uid: int) -> int:
    """Return the first uid of the block that contains this one."""
    return uid - (uid - FIRST_PROJECT_UID) % BLOCK


def subordinate_ranges(files: Collection[Path] = SUBORDINATE) -> Iterator[range]:
    """Yield the ranges that `newuidmap` lets users become, from lines of `name:first:count`."""
    for file in files:
        with contextlib.suppress(OSError):
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError):
                    _, first, count = line.split(":")
                    yield range(int(first), int(first) + int(count))


def is_in_use(uid: int) -> bool:
    """Whether an account has this uid or a group has this gid. A project's jobs have both."""
    for find in (pwd.getpwuid, grp.getgrgid):
        with contextlib.suppress(KeyError):
            find(uid)
            return True
    return False


def _is_noted(registry: Path, first: int, home: Path, name: str, *, is_heir: bool = False) -> bool:
    """Whether the block is this home's. If so, it is noted with the present path of the home.

    If nothing can be noted, because `/var` is full or read-only, the home gets the block without a note: its
    name seldom leads to another's block, and jobs need a control plane that starts.
    """
    note, new = registry / str(first), registry / f".{first}.{os.getpid()}"
    try:
        registry.mkdir(mode=0o755, parents=True, exist_ok=True)
        new.write_text(f"{name}\n{home}\n{home.parent.stat().st_dev}\n", encoding="utf-8")
    except OSError as error:
        log.warning("uids.not_noted", first_uid=first, error=str(error))
        return is_heir or not note.exists() or _is_own(note, home, name)
    try:
        os.link(new, note)  # whole, and by one home alone
    except FileExistsError:
        if not is_heir and not _is_own(note, home, name):
            return False
        new.replace(note)  # the home may lie elsewhere now
    finally:
        new.unlink(missing_ok=True)
    return True


def _is_own(note: Path, home: Path, name: str) -> bool:
    """Whether the note is about this home, or about a home whose place this home has taken."""
    noted = note.read_text(encoding="utf-8").splitlines()
    if noted[:1] == [name]:
        return True
    with contextlib.suppress(OSError, IndexError):
        return home.samefile(noted[1])
    return False


def _forget_gone(registry: Path) -> None:
    """Give back the blocks of homes that were removed.

    Reads at most `MAX_NOTES_READ` notes, others each time. A home whose file system is not mounted is not
    there either, and keeps its block: the folder above it is missing or lies on another device.
    """
    with contextlib.suppress(FileNotFoundError):
        notes = list(registry.iterdir())
        for note in random.sample(notes, min(len(notes), MAX_NOTES_READ)):
            with contextlib.suppress(OSError, ValueError):
                _, home, device = note.read_text(encoding="utf-8").splitlines()
                if Path(home).parent.stat().st_dev == int(device) and not Path(home).exists():
                    note.unlink()


DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
MAX_DEPTH = 64
"""Levels of directories. Deeper files keep their owner, so no job of the copy can use them."""


def chown_home(home: Path, moves: Sequence[tuple[Project, int]]) -> None:
    """Give checkpoints and caches that belong to the users of these projects to users with the new uids.

    May be repeated with the same moves. Does nothing without root, because only homes of root have files of
    several users. The home must be out of reach of the former users, as a closed directory is.
    """
    if os.geteuid() != 0:
        return
    changes = {project.uid: uid for project, uid in moves}
    caches = home / "caches"
    for folder in (home / "checkpoints", caches):
        # A link may lead to the original's directory.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            top = os.open(folder, DIRECTORY)
            try:
                _chown_tree(top, changes)
            finally:
                os.close(top)
    for project, uid in moves:
        with contextlib.suppress(FileNotFoundError):
            (caches / f"{project.name}-{project.uid}").rename(caches / f"{project.name}-{uid}")


def _chown_tree(folder: int, changes: Mapping[int, int], depth: int = 0) -> None:
    """Change the owner and the group of everything in an open directory, links themselves included."""
    with os.scandir(folder) as entries:
        for entry in entries:
            facts = entry.stat(follow_symlinks=False)
            uid, gid = changes.get(facts.st_uid, -1), changes.get(facts.st_gid, -1)
            if (uid, gid) != (-1, -1):
                os.chown(entry.name, uid, gid, dir_fd=folder, follow_symlinks=False)
            if depth < MAX_DEPTH and entry.is_dir(follow_symlinks=False):
                inner = os.open(entry.name, DIRECTORY, dir_fd=folder)
                try:
                    _chown_tree(inner, changes, depth + 1)
                finally:
                    os.close(inner)
