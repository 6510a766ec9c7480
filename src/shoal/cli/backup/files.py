"""Walk the directories that a backup saves. Jobs own some of them and change them meanwhile.

Every step goes from an open directory to one name in it and follows no link, so replacing a directory by a
link leads nowhere else. Files that cannot be saved are left out and named. The work for one job is bounded.

`give_checkpoints` gives restored checkpoints to the users that the jobs of the restored home run as.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote_from_bytes

from shoal.bounded_file import FLAGS
from shoal.engines.refusal import is_name
from shoal.store.copying import project_uids

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
PLAIN = "/ =,:+@~"
"""Characters that a stored name keeps, beside letters, digits, `_`, `.` and `-`. Others become `%XX`, because
jobs choose the names of their checkpoints, and file names need not be text.
"""
MAX_NAMED = 100
MAX_ENTRIES = 100_000
"""Names in one job's directories. Memory holds the names of a directory, and the manifest holds all."""
MAX_DEPTH = 64
"""Each level keeps a descriptor open."""
MAX_NAME = 2_000
"""Bytes. A path may have 4,095, and the home that it is restored to takes some."""
MAX_HOLES = 64 << 20
"""A file of 16 TiB that is one hole takes no disk, but in a backup each of its bytes takes one."""
BLOCK = 512
"""`st_blocks` counts these, whatever the file system's own blocks are."""


class SkippedFiles:
    """What a backup leaves out, and why. It counts everything and names the first `MAX_NAMED`."""

    def __init__(self) -> None:
        self.named: dict[str, str] = {}
        self.count = 0

    def add(self, name: str, reason: str) -> None:
        self.count += 1
        if len(self.named) < MAX_NAMED:
            self.named[stored_name(name)] = reason


class WalkedFile(NamedTuple):
    """A plain file, as its directory had it when the walk passed."""

    name: str
    directory: int
    """Open while the walk stands at this file."""
    base: str
    facts: os.stat_result
    owner: int | None
    """The only user whose files may be saved from here; None in the home, whose files only Shoal changes."""


class _Budget:
    """What is left of `MAX_ENTRIES`, and the files already seen under another name."""

    def __init__(self) -> None:
        self.entries = MAX_ENTRIES
        self.linked: dict[tuple[int, int], str] = {}


def walk_home(home: Path, left_out: SkippedFiles, is_wanted: Callable[[str], bool]) -> Iterator[WalkedFile]:
    """Yield the plain files below the wanted entries of the home."""
    with _opened(os.fspath(home), None, follows=True) as directory:
        for base in filter(is_wanted, _names(directory)):
            yield from _entry(directory, base, base, left_out)


def walk_of_jobs(home: Path, name: str, left_out: SkippedFiles) -> Iterator[WalkedFile]:
    """Yield the plain files in a folder that has a directory for each job, owned by the job's user.

    Only that user's files are saved: a job can link to files of others, and root could read them. Yield
    nothing if there is no such folder.
    """
    try:
        with _opened(os.fspath(home / name), None) as directory:
            for base in _names(directory):
                with contextlib.suppress(FileNotFoundError):
                    owner = os.stat(base, dir_fd=directory, follow_symlinks=False).st_uid
                    yield from _entry(directory, base, f"{name}/{base}", left_out, owner, _Budget())
    except FileNotFoundError:
        return
    except OSError as error:  # a link to another disk
        left_out.add(name, f"it cannot be opened as a directory: {error.strerror}")


def open_walked(walked: WalkedFile, left_out: SkippedFiles) -> tuple[int, os.stat_result] | None:
    """Return a descriptor of the walked file and the facts to save it by, or None if it is left out.

    A job can make the file longer at any moment, so the saved size is the one that was checked here. Raise
    `OSError` if a file of the home itself cannot be opened.
    """
    try:
        fd = os.open(walked.base, FLAGS, dir_fd=walked.directory)
    except FileNotFoundError:
        left_out.add(walked.name, "it was removed meanwhile")
        return None
    except OSError as error:
        if walked.owner is None:
            raise
        left_out.add(walked.name, f"it cannot be opened: {error.strerror}")
        return None
    facts = os.fstat(fd)
    if problem := _problem(facts, walked.owner) or _too_sparse(fd, facts):
        left_out.add(walked.name, problem)
        os.close(fd)
        return None
    return fd, facts


def allocated_bytes(files: Iterator[WalkedFile]) -> int:
    """Return the bytes that these files take on the disk."""
    return sum(file.facts.st_blocks * BLOCK for file in files)


def stored_name(name: str) -> str:
    return quote_from_bytes(os.fsencode(name), safe=PLAIN)


@contextlib.contextmanager
def _opened(path: str, above: int | None, *, follows: bool = False) -> Iterator[int]:
    directory = os.open(path, DIRECTORY & ~os.O_NOFOLLOW if follows else DIRECTORY, dir_fd=above)
    try:
        yield directory
    finally:
        os.close(directory)


def _entry(
    above: int,
    base: str,
    name: str,
    left_out: SkippedFiles,
    owner: int | None = None,
    budget: _Budget | None = None,
    depth: int = 0,
) -> Iterator[WalkedFile]:
    try:
        facts = os.stat(base, dir_fd=above, follow_symlinks=False)
        if len(os.fsencode(name)) > MAX_NAME:
            left_out.add(name, f"its path has more than {MAX_NAME:,} bytes")
        elif stat.S_ISDIR(facts.st_mode):
            with _opened(base, above) as directory:
                yield from _entries(directory, name, left_out, owner, budget, depth)
        elif problem := _problem(facts, owner) or _linked(facts, name, budget):
            left_out.add(name, problem)
        else:
            yield WalkedFile(name, above, base, facts, owner)
    except FileNotFoundError:
        left_out.add(name, "it was removed meanwhile")
    except OSError as error:
        if owner is None:
            raise
        left_out.add(name, f"it cannot be read: {error.strerror}")


def _entries(
    directory: int, name: str, left_out: SkippedFiles, owner: int | None, budget: _Budget | None, depth: int
) -> Iterator[WalkedFile]:
    if depth == MAX_DEPTH:
        left_out.add(name, f"it lies more than {MAX_DEPTH} directories deep")
        return
    names = _names(directory, None if budget is None else budget.entries + 1)
    if budget is not None:
        if len(names) > budget.entries:
            left_out.add(name, f"its job has more than {MAX_ENTRIES:,} files: not all are saved")
            names = names[: budget.entries]
        budget.entries -= len(names)
    for base in names:
        yield from _entry(directory, base, f"{name}/{base}", left_out, owner, budget, depth + 1)


def _names(directory: int, most: int | None = None) -> list[str]:
    with os.scandir(directory) as entries:
        return sorted(entry.name for entry in islice(entries, most))


def _problem(facts: os.stat_result, owner: int | None) -> str:
    """Return why a file with these facts is not saved, or ""."""
    if stat.S_ISLNK(facts.st_mode):
        return "it is a symbolic link"
    if not stat.S_ISREG(facts.st_mode):
        return "it is not a plain file"
    if owner is not None and facts.st_uid != owner:
        return f"it belongs to user {facts.st_uid}, and its job's directory to user {owner}"
    return ""


def _linked(facts: os.stat_result, name: str, budget: _Budget | None) -> str:
    """Return "" for the first name of a file: a thousand names of a large file would be a thousand copies."""
    if budget is None or facts.st_nlink < 2:
        return ""
    first = budget.linked.setdefault((facts.st_dev, facts.st_ino), name)
    return "" if first == name else f"it is another name of {stored_name(first)}"


def _too_sparse(fd: int, facts: os.stat_result) -> str:
    """Return why a file has too many holes. At 64 MiB it stops, after at most 16,384 holes of 4 KiB."""
    at = holes = 0
    if facts.st_blocks * BLOCK >= facts.st_size:
        return ""
    with contextlib.suppress(OSError):  # ENXIO: no data after here; the last hole ends with the file
        while at < facts.st_size and holes <= MAX_HOLES:
            hole = os.lseek(fd, at, os.SEEK_HOLE)
            if hole >= facts.st_size:
                break
            holes += facts.st_size - hole
            at = os.lseek(fd, hole, os.SEEK_DATA)
            holes -= max(facts.st_size - at, 0)
    os.lseek(fd, 0, os.SEEK_SET)
    return f"it has more than {MAX_HOLES >> 20} MiB of holes" if holes > MAX_HOLES else ""


def give_checkpoints(folder: Path, database: Path) -> None:
    """Give each job's directory, and all in it, to the user of the job's project in this database.

    A resumed job then writes beside what it saved. No other user may reach the folder. Only root can give
    files away; a home of any other user runs its jobs as that user. A job that was submitted after the
    database was copied stays root's, because the restored home does not know it.
    """
    if os.geteuid() != 0 or not folder.is_dir():
        return
    job_ids = sorted(path.name for path in folder.iterdir() if is_name(path.name))
    for job_id, uid in project_uids(database, job_ids).items():
        for directory, _, files in os.walk(folder / job_id):
            os.chown(directory, uid, uid, follow_symlinks=False)
            for name in files:
                os.chown(Path(directory, name), uid, uid, follow_symlinks=False)
