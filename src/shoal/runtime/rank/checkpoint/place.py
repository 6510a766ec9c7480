"""Where checkpoints are kept: a folder, in memory or on disk, or a bucket."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from shoal.errors import StateError
from shoal.runtime.rank.checkpoint.manifest import Fence, FileRecord, Manifest, Name


class Place(Protocol):
    """`claim`, `commit` and `names` are rank 0's; the others any rank's, each for its own files."""

    title: str

    def claim(self, fence: Fence | None) -> Fence:
        """Shut out all groups before this one. None: outside of Shoal, a number higher than any before.

        `StateError`: a later group was here already.
        """
        ...

    def names(self) -> list[Name]:
        """What is committed, newest first."""
        ...

    def manifest(self, name: Name) -> Manifest:
        """`ValueError` or `OSError`: there is none that can be used."""
        ...

    def take(self, name: Name, source: str, files: Iterable[str]) -> None:
        """Copy these files of the folder `source`, durably; nobody sees them before `commit`."""
        ...

    def commit(self, manifest: Manifest, fence: Fence) -> None:
        """Make it visible, all at once, and drop the oldest ones beyond what is kept.

        `StateError`: a later group has claimed the place; nothing was committed.
        """
        ...

    def fetch(self, name: Name, files: dict[str, FileRecord], into: str) -> str | None:
        """Put these files into that folder, checked. Returns what was wrong with the first that is not."""
        ...


def fenced(mine: Fence, theirs: Fence, title: str) -> StateError:
    return StateError(
        f"attempt {theirs.epoch}, group {theirs.generation} has taken over {title}; "
        f"attempt {mine.epoch}, group {mine.generation} saves nothing there any more",
        hint="let this process end: its successor goes on",
    )


def said(error: BaseException) -> str:
    """What went wrong with a place, in one line: below it a store's library tells of its own insides."""
    first = next(iter(str(error).splitlines()), "") or type(error).__name__
    return first.partition(" error: ")[2] if first.startswith("Generic ") else first
