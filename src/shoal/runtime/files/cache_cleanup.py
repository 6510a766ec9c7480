"""Keep a project's caches within their size: whole entries go, those unused for the longest time first.

Runs as the job's user. An entry is removed only as a whole, because a tool would take half an entry for good.

This module also removes the lock files of builds that were killed. PyTorch has one process build an
extension, while the others wait as long as the file `lock` is in the extension's folder. If that process was
killed, they wait for ever. The builder keeps the file open until it removes it, so a lock that no process has
open is stale.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from itertools import islice

import msgspec

from shoal.clock import BootClock
from shoal.runtime.files import removal

CLOCK = BootClock()
DAY_S = 86400.0
KEEP_S = 30 * DAY_S
"""Entries that were not used for this long are removed."""
FRESH_S = DAY_S
"""Entries used within this time stay while other jobs run, whatever the size of the cache."""
TRIM_S = 5.0
MAX_LOOKED = 500_000
DEPTHS = {"uv": 1, "pip": 1, "matplotlib": 1, "huggingface": 3, "torch_extensions": 3}
"""How deep below each cache its entries are, which its tool can do without one by one; 2 for other caches."""
REMOVED = ".removed-"


class CacheEntry(msgspec.Struct):
    """A file or folder that can be removed by itself."""

    path: str
    num_bytes: int
    used_at: float


class OutOfTime(Exception):
    """The cache holds more than one walk may look at."""


def trim_cache(directory: str, max_bytes: int, *, is_alone: bool) -> None:
    """Remove old entries, then as many as it takes to reach the limit.

    The limit is `max_bytes`, a quarter of the disk, and a tenth of the disk left free. Blocks for at most
    three times `TRIM_S`, whatever the cache holds and whatever adds to it.
    """
    _finish_removals(directory, CLOCK.monotonic() + TRIM_S)
    until = CLOCK.monotonic() + TRIM_S
    now = CLOCK.now()
    entries: list[CacheEntry] = []
    with contextlib.suppress(OutOfTime):
        entries.extend(_entries(directory, until))
    disk = os.statvfs(directory)
    total, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    held = sum(entry.num_bytes for entry in entries)
    excess = max(held - min(max_bytes, total // 4), total // 10 - free)
    until = CLOCK.monotonic() + TRIM_S
    for entry in sorted(entries, key=lambda entry: entry.used_at):
        if CLOCK.monotonic() > until:
            return
        idle_s = now - entry.used_at
        if idle_s < KEEP_S and (excess <= 0 or (idle_s < FRESH_S and not is_alone)):
            continue
        away = f"{directory}/{REMOVED}{os.urandom(8).hex()}"
        with contextlib.suppress(OSError):
            os.rename(entry.path, away)  # in one move, so that no program ever finds half of the entry
            removal.remove(away, timeout_s=max(0.1, until - CLOCK.monotonic()))
            excess -= entry.num_bytes


def _finish_removals(directory: str, until: float) -> None:
    """Remove what an earlier trim left unfinished. Another job of the project may add to it meanwhile."""
    with os.scandir(directory) as entries:
        for looked, entry in enumerate(entries):
            if looked > MAX_LOOKED or (left_s := until - CLOCK.monotonic()) <= 0:
                return
            if entry.name.startswith(REMOVED):
                removal.remove(entry.path, timeout_s=left_s)


def _entries(directory: str, until: float) -> Iterator[CacheEntry]:
    """Yield the entries that could be measured as a whole. `OutOfTime`: there are more."""
    looked = 0
    waiting = [(directory, 0)]
    while waiting:
        path, depth = waiting.pop()
        tool = path[len(directory) + 1 :].split("/")[0]
        if depth and depth >= DEPTHS.get(tool, 2):
            entry = CacheEntry(path, 0, 0.0)
            looked = _measure(entry, looked, until)
            yield entry
            continue
        with contextlib.suppress(OSError), os.scandir(path) as inner:
            for child in inner:
                looked += 1
                if looked > MAX_LOOKED or CLOCK.monotonic() > until:
                    raise OutOfTime
                if child.is_dir(follow_symlinks=False):
                    waiting.append((child.path, depth + 1))
                else:
                    facts = child.stat(follow_symlinks=False)
                    yield CacheEntry(child.path, facts.st_blocks * 512, max(facts.st_atime, facts.st_mtime))


def _measure(entry: CacheEntry, looked: int, until: float) -> int:
    """Fill in the size and last use, and return the number of files looked at. `OutOfTime`: too many."""
    waiting = [entry.path]
    while waiting:
        path = waiting.pop()
        with contextlib.suppress(OSError), os.scandir(path) as inner:
            entry.used_at = max(entry.used_at, os.lstat(path).st_mtime)
            for child in inner:
                looked += 1
                if looked > MAX_LOOKED or CLOCK.monotonic() > until:
                    raise OutOfTime
                facts = child.stat(follow_symlinks=False)
                entry.num_bytes += facts.st_blocks * 512
                if child.is_dir(follow_symlinks=False):
                    waiting.append(child.path)
                else:
                    entry.used_at = max(entry.used_at, facts.st_atime, facts.st_mtime)
    return looked


EXTENSIONS = "torch_extensions"
MAX_LOCKS = 1000
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def remove_stale_locks(cache: str, uid: int) -> None:
    """Remove the locks below this cache that no process of the user has open.

    `OSError`: the cache cannot be read.
    """
    cache_fd = os.open(cache, DIRECTORY)
    try:
        locks = [
            (EXTENSIONS, version, extension)
            for version in _names_in(cache_fd, (EXTENSIONS,))
            for extension in _names_in(cache_fd, (EXTENSIONS, version))
            if "lock" in _names_in(cache_fd, (EXTENSIONS, version, extension))
        ]
        held = _held_by(uid) if locks else set()
        for folders in locks[:MAX_LOCKS]:
            if "/".join((*folders, "lock")) not in held:
                _unlink(cache_fd, folders, "lock")
    finally:
        os.close(cache_fd)


def _held_by(uid: int) -> set[str]:
    """Return the locks that processes of this user have open, by the last parts of their paths.

    Links below /proc are read but not followed, because a job may have a file system that does not answer.
    The open files of a process with more rights cannot be read, but such a process builds no extension.
    """
    held = set()
    for pid in _processes_of(uid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    held.add("/".join(os.readlink(f"/proc/{pid}/fd/{name}").split("/")[-4:]))
    return held


def _processes_of(uid: int) -> Iterator[str]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if os.stat(f"/proc/{name}").st_uid == uid:
                    yield name


def _names_in(cache_fd: int, folders: tuple[str, ...]) -> list[str]:
    """Return some of the names there, or none if there is no directory."""
    with contextlib.suppress(OSError):
        fd = _descend(cache_fd, folders)
        try:
            with os.scandir(fd) as entries:
                return [entry.name for entry in islice(entries, MAX_LOCKS)]
        finally:
            os.close(fd)
    return []


def _unlink(cache_fd: int, folders: tuple[str, ...], name: str) -> None:
    with contextlib.suppress(OSError):
        fd = _descend(cache_fd, folders)
        try:
            os.unlink(name, dir_fd=fd)
        finally:
            os.close(fd)


def _descend(cache_fd: int, folders: tuple[str, ...]) -> int:
    """Open the directory below. No part of the path may be a link. `OSError`: there is no such directory."""
    fd = os.dup(cache_fd)
    for name in folders:
        try:
            inner = os.open(name, DIRECTORY, dir_fd=fd)
        finally:
            os.close(fd)
        fd = inner
    return fd
