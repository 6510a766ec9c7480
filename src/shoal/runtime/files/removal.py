"""Remove what a job left: trees of any depth and size, with anything in them. No link is followed.

A directory inside is moved up to the top instead of being descended into. So neither depth nor long paths
cost descriptors, stack or memory, and a later call can finish a tree that is too large for one.
"""

from __future__ import annotations

import contextlib
import os

from shoal.clock import BootClock

CLOCK = BootClock()
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def remove(path: str, *, timeout_s: float) -> bool:
    """Remove the file or tree. May be repeated, also by several processes at once.

    True: it is gone, or never existed. False: time ran out, or something in it cannot be removed.
    """
    try:
        os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:
        empty(path, timeout_s=timeout_s)
        with contextlib.suppress(OSError):
            os.rmdir(path)
    return not os.path.lexists(path)


def empty(path: str, *, timeout_s: float) -> None:
    """Remove as much of the directory's content as time allows."""
    with contextlib.suppress(OSError):
        _Emptier(CLOCK.monotonic() + timeout_s).empty(path)


class _Emptier:
    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        # No job can guess the prefix, so none can have put a thousand such names in the way.
        self._prefix = f".{os.urandom(8).hex()}."
        self._num_lifted = 0

    def empty(self, path: str) -> None:
        """Empty the directory. `OSError`: it cannot be opened."""
        top = _open(path, None)
        try:
            # Names come and go while they are listed, so repeat until one pass changes nothing.
            while self._pass(top, top):
                pass
        finally:
            os.close(top)

    def _pass(self, directory: int, top: int) -> bool:
        """Go through the names of one directory once. True: something changed, and there is time left."""
        has_changed = False
        with os.scandir(directory) as entries:
            for entry in entries:
                if CLOCK.monotonic() > self._deadline:
                    return False
                with contextlib.suppress(OSError):
                    self._remove_entry(entry, directory, top)
                    has_changed = True
        return has_changed

    def _remove_entry(self, entry: os.DirEntry[str], directory: int, top: int) -> None:
        """Remove or move up one entry. `OSError`: it is still where it was."""
        if not entry.is_dir(follow_symlinks=False):
            os.unlink(entry.name, dir_fd=directory)
        elif directory == top:
            self._flatten(entry.name, top)
        else:
            self._lift(entry.name, directory, top)

    def _flatten(self, name: str, top: int) -> None:
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=top)
            return
        inner = _open(name, top)
        try:
            self._pass(inner, top)
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=top)

    def _lift(self, name: str, directory: int, top: int) -> None:
        self._num_lifted += 1
        new = f"{self._prefix}{self._num_lifted}"
        try:
            os.rename(name, new, src_dir_fd=directory, dst_dir_fd=top)
        except PermissionError:
            os.close(_open(name, directory))  # makes it writable, which moving a directory requires
            os.rename(name, new, src_dir_fd=directory, dst_dir_fd=top)


def _open(name: str, above: int | None) -> int:
    """Open the directory itself, never the target of a link. It is made writable if it is our own."""
    pinned = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    try:
        with contextlib.suppress(OSError):
            os.chmod(f"/proc/self/fd/{pinned}", 0o700)
        return os.open(".", DIRECTORY, dir_fd=pinned)
    finally:
        os.close(pinned)
