"""Remove the lock files of builds that were killed.

PyTorch has one process build an extension. The others wait for as long as the file `lock` is in the
extension's folder, for ever if that process was killed. It has the file open until it removes it, so a lock
that no process has open is nobody's.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from itertools import islice

EXTENSIONS = "torch_extensions"
MAX_LOCKS = 1000
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def clear(cache: str, uid: int) -> None:
    """Remove the locks below this cache that no process of the user has open.

    `OSError`: the cache cannot be read.
    """
    own = os.open(cache, DIRECTORY)
    try:
        locks = [
            (EXTENSIONS, version, extension)
            for version in _names_in(own, (EXTENSIONS,))
            for extension in _names_in(own, (EXTENSIONS, version))
            if "lock" in _names_in(own, (EXTENSIONS, version, extension))
        ]
        held = _held_by(uid) if locks else set()
        for folders in locks[:MAX_LOCKS]:
            if "/".join((*folders, "lock")) not in held:
                _unlink(own, folders, "lock")
    finally:
        os.close(own)


def _held_by(uid: int) -> set[str]:
    """The locks that processes of this user have open, by the last parts of their paths.

    Links below /proc are read and not followed: a job may have a file system of its own that does not answer.
    What a process with more rights has open cannot be read. It builds no extension.
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


def _names_in(own: int, folders: tuple[str, ...]) -> list[str]:
    """Some of the names there; none where there is no directory."""
    with contextlib.suppress(OSError):
        fd = _descend(own, folders)
        try:
            with os.scandir(fd) as entries:
                return [entry.name for entry in islice(entries, MAX_LOCKS)]
        finally:
            os.close(fd)
    return []


def _unlink(own: int, folders: tuple[str, ...], name: str) -> None:
    with contextlib.suppress(OSError):
        fd = _descend(own, folders)
        try:
            os.unlink(name, dir_fd=fd)
        finally:
            os.close(fd)


def _descend(own: int, folders: tuple[str, ...]) -> int:
    """The directory below, no part of the way a link. `OSError`: there is none."""
    fd = os.dup(own)
    for name in folders:
        try:
            inner = os.open(name, DIRECTORY, dir_fd=fd)
        finally:
            os.close(fd)
        fd = inner
    return fd
