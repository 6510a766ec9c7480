"""What a program has saved by itself: whatever else lies in its checkpoint directory. No file is opened.

A folder counts as one save, with the size of its files. Links are passed over.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from shoal.engines.base import OwnSave

MAX_SHOWN = 50
MAX_LOOKED_AT = 5_000
"""Files and folders of one look. The size of what it does not reach is not counted."""
MAX_DEPTH = 3
MAX_NAME = 255
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Walk:
    """One look. `may_look`: asked before each file."""

    def __init__(self, may_look: Callable[[], bool]) -> None:
        self._may_look = may_look
        self._left = MAX_LOOKED_AT

    def saves(self, directory: int, is_ours: Callable[[str], bool]) -> tuple[tuple[OwnSave, ...], int]:
        """The newest of them, and how many there are. `is_ours`: a name that somebody else deals with."""
        found: list[OwnSave] = []
        with os.scandir(directory) as entries:
            for entry in entries:
                if not self._may_go_on():
                    break
                one = None if is_ours(entry.name) else self._save(directory, entry)
                if one is not None:
                    found.append(one)
        newest = sorted(found, key=lambda one: (-one.saved_at, one.name))
        return tuple(newest[:MAX_SHOWN]), len(found)

    def _save(self, directory: int, entry: os.DirEntry[str]) -> OwnSave | None:
        # A name is bytes to the kernel; only text can be told.
        name = os.fsencode(entry.name).decode(errors="replace")[:MAX_NAME]
        with contextlib.suppress(OSError):
            if entry.is_file(follow_symlinks=False):
                seen = entry.stat(follow_symlinks=False)
                return OwnSave(name=name, saved_at=seen.st_mtime, size_bytes=seen.st_size)
            if entry.is_dir(follow_symlinks=False):
                saved_at, size_bytes = self._inside(directory, entry.name, 1)
                return OwnSave(name=f"{name}/", saved_at=saved_at, size_bytes=size_bytes)
        return None

    def _inside(self, above: int, name: str, depth: int) -> tuple[float, int]:
        """When any file in it was last written, and how much they are together."""
        fd = os.open(name, FOLDER, dir_fd=above)
        try:
            newest, total = os.fstat(fd).st_mtime, 0
            with os.scandir(fd) as entries:
                for entry in entries:
                    if not self._may_go_on():
                        break
                    if entry.is_file(follow_symlinks=False):
                        seen = entry.stat(follow_symlinks=False)
                        newest, total = max(newest, seen.st_mtime), total + seen.st_size
                    elif depth < MAX_DEPTH and entry.is_dir(follow_symlinks=False):
                        saved_at, size_bytes = self._inside(fd, entry.name, depth + 1)
                        newest, total = max(newest, saved_at), total + size_bytes
            return newest, total
        finally:
            os.close(fd)

    def _may_go_on(self) -> bool:
        self._left -= 1
        return self._left >= 0 and self._may_look()
