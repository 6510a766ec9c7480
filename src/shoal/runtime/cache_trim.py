"""Keep a project's caches within their size: what was not used for longest goes first, as a whole.

Runs as the job's user. A cache goes by entries that its tool can miss: half of one would be believed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import msgspec

from shoal.clock import BootClock
from shoal.runtime import removal

CLOCK = BootClock()
DAY_S = 86400.0
KEEP_S = 30 * DAY_S
"""Entries that nobody has used for so long are removed."""
FRESH_S = DAY_S
"""What was used since then stays while other jobs run, however much there is."""
TRIM_S = 5.0
MAX_LOOKED = 500_000
DEPTHS = {"uv": 1, "pip": 1, "matplotlib": 1, "huggingface": 3, "torch_extensions": 3}
"""How far below the cache entries are that can be missed one by one; 2 for others."""
REMOVED = ".removed-"


class Entry(msgspec.Struct):
    """Something that can be removed by itself."""

    path: str
    num_bytes: int
    used_at: float


class OutOfTime(Exception):
    """There is more in the cache than one look may cost."""


def trim(directory: str, max_bytes: int, *, is_alone: bool) -> None:
    """Remove what is old; then as much as takes it to `max_bytes`, or to a quarter of its disk, and leaves a
    tenth of that free. Blocks for three times `TRIM_S` at most, whatever is there and whoever adds to it.
    """
    _finish_removals(directory, CLOCK.monotonic() + TRIM_S)
    until = CLOCK.monotonic() + TRIM_S
    now = CLOCK.now()
    entries: list[Entry] = []
    with contextlib.suppress(OutOfTime):
        entries.extend(_entries(directory, until))
    disk = os.statvfs(directory)
    total, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    held = sum(entry.num_bytes for entry in entries)
    excess = max(held - min(max_bytes, total // 4), total // 10 - free)
    until = CLOCK.monotonic() + TRIM_S
    for entry in sorted(entries, key=lambda one: one.used_at):
        if CLOCK.monotonic() > until:
            return
        idle_s = now - entry.used_at
        if idle_s < KEEP_S and (excess <= 0 or (idle_s < FRESH_S and not is_alone)):
            continue
        away = f"{directory}/{REMOVED}{os.urandom(8).hex()}"
        with contextlib.suppress(OSError):
            os.rename(entry.path, away)  # at once: nobody finds half of it, whenever we are killed
            removal.remove(away, timeout_s=max(0.1, until - CLOCK.monotonic()))
            excess -= entry.num_bytes


def _finish_removals(directory: str, until: float) -> None:
    """Remove what an earlier trim could not finish. Another job of the project may add to it meanwhile."""
    with os.scandir(directory) as entries:
        for looked, entry in enumerate(entries):
            if looked > MAX_LOOKED or (left_s := until - CLOCK.monotonic()) <= 0:
                return
            if entry.name.startswith(REMOVED):
                removal.remove(entry.path, timeout_s=left_s)


def _entries(directory: str, until: float) -> Iterator[Entry]:
    """Those that could be looked at as a whole. `OutOfTime`: there are more."""
    looked = 0
    waiting = [(directory, 0)]
    while waiting:
        path, depth = waiting.pop()
        tool = path[len(directory) + 1 :].split("/")[0]
        if depth and depth >= DEPTHS.get(tool, 2):
            found = Entry(path, 0, 0.0)
            looked = _measure(found, looked, until)
            yield found
            continue
        with contextlib.suppress(OSError), os.scandir(path) as inner:
            for one in inner:
                looked += 1
                if looked > MAX_LOOKED or CLOCK.monotonic() > until:
                    raise OutOfTime
                if one.is_dir(follow_symlinks=False):
                    waiting.append((one.path, depth + 1))
                else:
                    facts = one.stat(follow_symlinks=False)
                    yield Entry(one.path, facts.st_blocks * 512, max(facts.st_atime, facts.st_mtime))


def _measure(entry: Entry, looked: int, until: float) -> int:
    """Fill in what is below it, and return how much was looked at by now. `OutOfTime`: it is too much."""
    waiting = [entry.path]
    while waiting:
        path = waiting.pop()
        with contextlib.suppress(OSError), os.scandir(path) as inner:
            entry.used_at = max(entry.used_at, os.lstat(path).st_mtime)
            for one in inner:
                looked += 1
                if looked > MAX_LOOKED or CLOCK.monotonic() > until:
                    raise OutOfTime
                facts = one.stat(follow_symlinks=False)
                entry.num_bytes += facts.st_blocks * 512
                if one.is_dir(follow_symlinks=False):
                    waiting.append(one.path)
                else:
                    entry.used_at = max(entry.used_at, facts.st_atime, facts.st_mtime)
    return looked
