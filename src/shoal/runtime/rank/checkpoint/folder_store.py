"""Where checkpoints are kept: a folder, in memory or on disk, or a bucket.

Checkpoints in a folder of a file system: on a disk, shared or not, or in memory.

All that decides happens under one lock: claims, commits, removals. A folder on several nodes must be a file
system whose locks hold between nodes (NFS 4 does; Lustre when mounted with `flock`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from typing import Protocol

import msgspec

from shoal.errors import StateError
from shoal.runtime.rank.checkpoint.manifest import (
    MANIFEST,
    CheckpointManifest,
    CheckpointName,
    Fence,
    FileRecord,
    parse_name,
    problem_of,
    read_manifest,
)


class CheckpointStore(Protocol):
    """`claim`, `commit` and `names` are rank 0's; the others any rank's, each for its own files."""

    title: str

    def claim(self, fence: Fence | None) -> Fence:
        """Shut out all groups before this one. None: outside of Shoal, a number higher than any before.

        `StateError`: a later group was here already.
        """
        ...

    def names(self) -> list[CheckpointName]:
        """What is committed, newest first."""
        ...

    def manifest(self, name: CheckpointName) -> CheckpointManifest:
        """`ValueError` or `OSError`: there is none that can be used."""
        ...

    def take(self, name: CheckpointName, source: str, files: Iterable[str]) -> None:
        """Copy these files of the folder `source` durably. They are not visible before `commit`."""
        ...

    def commit(self, manifest: CheckpointManifest, fence: Fence) -> None:
        """Make it visible, all at once, and drop the oldest ones beyond what is kept.

        `StateError`: a later group has claimed the place; nothing was committed.
        """
        ...

    def fetch(self, name: CheckpointName, files: dict[str, FileRecord], into: str) -> str | None:
        """Put these files into that folder, checked. Returns what was wrong with the first that is not."""
        ...


def fenced_error(mine: Fence, theirs: Fence, title: str) -> StateError:
    return StateError(
        f"attempt {theirs.epoch}, group {theirs.rendezvous_round} has taken over {title}; "
        f"attempt {mine.epoch}, group {mine.rendezvous_round} saves nothing there any more",
        hint="let this process end: its successor goes on",
    )


def error_summary(error: BaseException) -> str:
    """What went wrong with a place, in one line: below it a store's library tells of its own insides."""
    first = next(iter(str(error).splitlines()), "") or type(error).__name__
    return first.partition(" error: ")[2] if first.startswith("Generic ") else first


FENCE = ".fence.json"
LOCK = ".lock"
UNFINISHED = ".unfinished-"


class FolderStore:
    """A `Place`. `keep`: how many stay; the newest complete one always does."""

    def __init__(self, path: str, *, keep: int) -> None:
        self.title = path
        self._path = path
        self._keep = keep

    def claim(self, fence: Fence | None) -> Fence:
        os.makedirs(self._path, exist_ok=True)
        with self._lock():
            newest = self._fence()
            mine = fence or Fence(epoch=newest.epoch + 1)
            if newest > mine:
                raise fenced_error(mine, newest, self.title)
            _write(os.path.join(self._path, FENCE), msgspec.json.encode(mine))
            self._sweep(mine)
        return mine

    def names(self) -> list[CheckpointName]:
        parsed = [parse_name(entry) for entry in os.listdir(self._path)]
        return sorted((name for name in parsed if name is not None), reverse=True)

    def manifest(self, name: CheckpointName) -> CheckpointManifest:
        with open(os.path.join(self.where(name), MANIFEST), "rb") as file:
            return read_manifest(file.read(), name)

    def where(self, name: CheckpointName) -> str:
        return os.path.join(self._path, str(name))

    def beside(self, entry: str) -> str:
        """Another path in the same folder, which is no checkpoint."""
        return os.path.join(self._path, entry)

    def unfinished(self, name: CheckpointName) -> str:
        """Where its files go before it is committed."""
        return os.path.join(self._path, f"{UNFINISHED}{name}")

    def take(self, name: CheckpointName, source: str, files: Iterable[str]) -> None:
        target = self.unfinished(name)
        os.makedirs(target, exist_ok=True)
        for file in files:
            path = os.path.join(target, file)
            shutil.copyfile(os.path.join(source, file), path)
            _sync(path)

    def commit(self, manifest: CheckpointManifest, fence: Fence) -> None:
        unfinished, final = self.unfinished(manifest.name), self.where(manifest.name)
        _write(os.path.join(unfinished, MANIFEST), msgspec.json.encode(manifest))
        _sync(unfinished)
        with self._lock():
            newest = self._fence()
            if newest > fence:
                shutil.rmtree(unfinished, ignore_errors=True)
                raise fenced_error(fence, newest, self.title)
            # It exists only if a damaged one was fetched again, or if a step was saved twice.
            shutil.rmtree(final, ignore_errors=True)
            os.rename(unfinished, final)
            _sync(self._path)
            for old in self.names()[self._keep :]:
                if old != manifest.name:
                    shutil.rmtree(self.where(old), ignore_errors=True)

    def fetch(self, name: CheckpointName, files: dict[str, FileRecord], into: str) -> str | None:
        """Checks only: what is here is read from here."""
        problems = (problem_of(os.path.join(self.where(name), file), files[file]) for file in files)
        return next((problem for problem in problems if problem), None)

    def _fence(self) -> Fence:
        try:
            with open(os.path.join(self._path, FENCE), "rb") as file:
                return msgspec.json.decode(file.read(), type=Fence)
        except FileNotFoundError:
            return Fence()

    def _sweep(self, mine: Fence) -> None:
        """Remove what earlier groups began: they cannot commit it any more."""
        for entry in os.listdir(self._path):
            name = parse_name(entry.removeprefix(UNFINISHED))
            if entry.startswith(UNFINISHED) and name is not None and name.fence < mine:
                shutil.rmtree(os.path.join(self._path, entry), ignore_errors=True)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        fd = os.open(os.path.join(self._path, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _write(path: str, data: bytes) -> None:
    """All of it or what was there before, also after a power cut."""
    with open(f"{path}.new", "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(f"{path}.new", path)
    _sync(os.path.dirname(path))


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
