"""Read files and folders that a job may change at the same time, without trusting what they claim.

A job can make its file longer between `fstat` and the last read. A sparse file of up to 16 TiB needs no disk.
The job can put a link or a FIFO in the file's place, or take a lease on it, which delays every other open by
45 s. So this module ignores `st_size`, follows no links, and opens without waiting.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice

CHUNK_BYTES = 1 << 18
FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

Path = str | os.PathLike[str]
BeforeRead = Callable[[], object]
"""Called before each chunk. An exception from it ends the read."""


class UnreadableFile(OSError):
    """The file is longer than the limit, or no plain file. `strerror` says which."""


def read_whole(
    path: Path, most: int, *, dir_fd: int | None = None, before_read: BeforeRead | None = None
) -> bytes:
    """Return the content of a plain file. `UnreadableFile`: it has more than `most` bytes."""
    with plain_file(path, dir_fd=dir_fd) as fd:
        data = read_fd(fd, most + 1, before_read)
    if len(data) > most:
        raise UnreadableFile(errno.EFBIG, f"it is longer than {most} bytes", os.fspath(path))
    return data


def read_start(path: Path, most: int, *, dir_fd: int | None = None) -> bytes:
    """Return at most the first `most` bytes of a plain file. Files in `/proc` are plain files, too."""
    with plain_file(path, dir_fd=dir_fd) as fd:
        return read_fd(fd, most)


def read_end(path: Path, most: int) -> bytes:
    """Return at most the last `most` bytes that the file had when it was opened."""
    with plain_file(path) as fd:
        os.lseek(fd, max(os.fstat(fd).st_size - most, 0), os.SEEK_SET)
        return read_fd(fd, most)


def read_fd(fd: int, most: int, before_read: BeforeRead | None = None) -> bytes:
    """Read from the current position to the end, at most `most` bytes."""
    pieces: list[bytes] = []
    left = most
    while left > 0:
        if before_read is not None:
            before_read()
        piece = os.read(fd, min(left, CHUNK_BYTES))
        if not piece:
            break
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


@contextmanager
def plain_file(path: Path, *, dir_fd: int | None = None) -> Iterator[int]:
    """Open a plain file for reading. `UnreadableFile`: it is not plain. `OSError`: as from `os.open`."""
    try:
        fd = os.open(path, FLAGS, dir_fd=dir_fd)
    except ValueError as error:  # a NUL in its name
        raise UnreadableFile(errno.EINVAL, "its name is none") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise UnreadableFile(errno.EINVAL, "it is not a plain file", os.fspath(path))
        yield fd
    finally:
        os.close(fd)


def list_names(folder: Path | int, most: int) -> list[str]:
    """Return at most `most` names of the folder, in no order. The others are not even listed."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in islice(entries, most)]
