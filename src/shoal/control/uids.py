"""Choose the Unix users that a home's projects get: a block that nobody else on this machine has.

Blocks lie above the subordinate ids that `useradd` hands out (to 600,100,000 by default) and above containers
of systemd (to 1,879,048,191), and below its foreign ids (from 2,147,352,576). A home's block follows from its
name in the register, so two homes seldom want the same one, also where their machines share a file system.
A home and its restored copy have two names.
"""

from __future__ import annotations

import contextlib
import grp
import hashlib
import os
import pwd
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path

import structlog

from shoal.errors import StateError
from shoal.loopback import FIRST_PROJECT_UID

BLOCK = 4_096
NUM_BLOCKS = 60_000
"""The last one ends at 2,145,760,000."""
MOST_LOOKED_AT = 200
SUBORDINATE = (Path("/etc/subuid"), Path("/etc/subgid"))
REGISTRY = Path("/var/lib/shoal/uids")
"""On each machine, a file for each block that a home of root's has. Its name is the first uid; in it are the
home's name in the register and its path."""

log = structlog.get_logger()


def claim_block(
    home: Path, name: str, registry: Path | None = None, used: Collection[int] = (), wanted: int = 1
) -> int:
    """Return the first uid of this home's block, which no other home on this machine gets from now on.

    May be repeated: a home keeps its block. Without root nothing is noted, since no job runs as another user.
    `used`: uids of projects that the home has already. A block with one of them is passed over, and so is one
    of whose first `wanted` uids an account or a group of this machine has one.
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
    """Return this uid for a new project. If it is no longer the home's alone, return the first one of another
    block: an account, a group or a subordinate range has it by now, or it is in the next home's block.

    Blocks: asks the system for accounts. `used`: uids of the home's projects.
    """
    is_past_block = uid == first_of(uid) and uid - 1 in used
    if is_past_block or is_in_use(uid) or overlapping(uid, tuple(subordinate_ranges())) is not None:
        return claim_block(home, name, used={*used, uid})
    return uid


def keep_blocks(
    uids: Collection[int], home: Path, name: str, registry: Path | None = None, *, is_heir: bool = False
) -> list[int]:
    """Note where the home is whose projects have these uids: it may have been moved, or restored here.

    Returns those uids that lie in blocks of another home on this machine. The notes of these blocks stay as
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
    """First uids of the blocks that the home may have, the one it should have in front. Pure."""
    begin = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    for number in range(NUM_BLOCKS):
        first = FIRST_PROJECT_UID + (begin + number) % NUM_BLOCKS * BLOCK
        if overlapping(first, taken) is None:
            yield first


def overlapping(uid: int, taken: Collection[range]) -> range | None:
    """The range, of those handed out as subordinate ids, that has part of the uid's block."""
    first = first_of(uid)
    return next((one for one in taken if one.start < first + BLOCK and first < one.stop), None)


def first_of(uid: int) -> int:
    """Return the first uid of the block that has this one."""
    return uid - (uid - FIRST_PROJECT_UID) % BLOCK


def subordinate_ranges(files: Collection[Path] = SUBORDINATE) -> Iterator[range]:
    """What `newuidmap` lets users become: lines of `name:first:count`."""
    for file in files:
        with contextlib.suppress(OSError):
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError):
                    _, first, count = line.split(":")
                    yield range(int(first), int(first) + int(count))


def is_in_use(uid: int) -> bool:
    """Whether an account has this uid, or a group this gid: a project's jobs have both."""
    for find in (pwd.getpwuid, grp.getgrgid):
        with contextlib.suppress(KeyError):
            find(uid)
            return True
    return False


def _is_noted(registry: Path, first: int, home: Path, name: str, *, is_heir: bool = False) -> bool:
    """Whether the block is this home's, which is noted with the path that the home has now.

    Where nothing can be noted, because `/var` is full or read-only, the home has a block without a note all
    the same: its name seldom leads to another's block, and jobs need a control plane that starts.
    """
    note, new = registry / str(first), registry / f".{first}.{os.getpid()}"
    try:
        registry.mkdir(mode=0o755, parents=True, exist_ok=True)
        new.write_text(f"{name}\n{home}\n", encoding="utf-8")
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
    """Whether the note is about this home, or about one whose place this home has taken."""
    noted = note.read_text(encoding="utf-8").splitlines()
    if noted[:1] == [name]:
        return True
    with contextlib.suppress(OSError, IndexError):
        return home.samefile(noted[1])
    return False


def _forget_gone(registry: Path) -> None:
    """Give back blocks of homes that were removed. Looks at `MOST_LOOKED_AT` notes at most."""
    with contextlib.suppress(FileNotFoundError), os.scandir(registry) as entries:
        for entry in islice(entries, MOST_LOOKED_AT):
            with contextlib.suppress(OSError, ValueError):
                _, home = Path(entry.path).read_text(encoding="utf-8").splitlines()
                if not Path(home).exists():
                    Path(entry.path).unlink()
