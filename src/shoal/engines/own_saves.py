"""What a program has saved by itself: whatever else lies in its checkpoint directory. No file is opened.

A folder counts as one save, with the size of its files. Links are passed over. What cannot be read, or is
too much for one look, is told with the save that it belongs to.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

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
        self.is_cut = False
        """Whether it ended before everything was seen."""

    def saves(self, directory: int, is_ours: Callable[[str], bool]) -> tuple[tuple[OwnSave, ...], int]:
        """The newest of them, and how many there are. `is_ours`: a name that somebody else deals with."""
        found: list[OwnSave] = []
        for entry in self.entries(directory):
            one = None if is_ours(entry.name) else self._save(directory, entry)
            if one is not None:
                found.append(one)
        newest = sorted(found, key=lambda one: (-one.saved_at, one.name))
        return tuple(newest[:MAX_SHOWN]), len(found)

    def entries(self, directory: int) -> Iterator[os.DirEntry[str]]:
        """What is in the folder, as far as this look goes."""
        with os.scandir(directory) as entries:
            for entry in entries:
                self._left -= 1
                if self._left < 0 or not self._may_look():
                    self.is_cut = True
                    return
                yield entry

    def _save(self, directory: int, entry: os.DirEntry[str]) -> OwnSave | None:
        """None: it is none, or was removed since it was listed."""
        name = _text(entry.name)
        try:
            if entry.is_file(follow_symlinks=False):
                seen = entry.stat(follow_symlinks=False)
                return OwnSave(name=name, saved_at=seen.st_mtime, size_bytes=seen.st_size)
            if not entry.is_dir(follow_symlinks=False):
                return None
            folder = Folder(self, entry.stat(follow_symlinks=False).st_mtime)
            folder.add(directory, entry.name)
        except FileNotFoundError:
            return None
        except OSError as error:
            return OwnSave(name=name, saved_at=0.0, size_bytes=0, problem=_unread("it", error))
        return OwnSave(
            name=f"{name}/",
            saved_at=folder.saved_at,
            size_bytes=folder.size_bytes,
            problem=folder.problem,
        )


class Folder:
    """When any file in it was last written, how much they are together, and why that is not all of it."""

    def __init__(self, walk: Walk, saved_at: float) -> None:
        self._walk = walk
        self.saved_at = saved_at
        self.size_bytes = 0
        self.problem = ""

    def add(self, above: int, name: str, depth: int = 1) -> None:
        """What is below this folder, too. `FileNotFoundError`: it was removed since it was listed. Raises no
        other `OSError`: the first one is the problem.
        """
        try:
            fd = os.open(name, FOLDER, dir_fd=above)
        except FileNotFoundError:
            raise
        except OSError as error:
            self._say(_unread(_text(name), error))
            return
        try:
            self.saved_at = max(self.saved_at, os.fstat(fd).st_mtime)
            for entry in self._walk.entries(fd):
                self._add_entry(fd, entry, depth)
        except OSError as error:
            self._say(_unread(_text(name), error))
        finally:
            os.close(fd)
        if self._walk.is_cut:
            self._say("not all of it was looked at, and its size is only of what was")

    def _add_entry(self, above: int, entry: os.DirEntry[str], depth: int) -> None:
        try:
            if entry.is_file(follow_symlinks=False):
                seen = entry.stat(follow_symlinks=False)
                self.saved_at = max(self.saved_at, seen.st_mtime)
                self.size_bytes += seen.st_size
            elif entry.is_dir(follow_symlinks=False) and depth < MAX_DEPTH:
                self.add(above, entry.name, depth + 1)
            elif entry.is_dir(follow_symlinks=False):
                self._say(f"what lies deeper than {MAX_DEPTH} folders is not counted")
        except FileNotFoundError:
            return
        except OSError as error:
            self._say(_unread(_text(entry.name), error))

    def _say(self, problem: str) -> None:
        self.problem = self.problem or problem


def _unread(name: str, error: OSError) -> str:
    return f"{name} cannot be read: {error.strerror or type(error).__name__}"


def _text(name: str) -> str:
    """A name is bytes to the kernel; only text can be told."""
    return os.fsencode(name).decode(errors="replace")[:MAX_NAME]
