"""Read files and folders that a job may change meanwhile, with a bound that relies on nothing they claim.

A job can make its file longer between `fstat` and the last read: sparse, up to 16 TiB need no disk. It can
put a link or a FIFO in its place, or take a lease on it, which delays everybody else's open by 45 s. So
`st_size` decides nothing here, links are not followed, and no open waits.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice

PIECE = 1 << 18
FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

Path = str | os.PathLike[str]
LookOn = Callable[[], object]
"""Called before each piece; what it raises ends the reading."""


class Damaged(OSError):
    """The file is longer than may be read, or no plain file. `strerror` says which."""


def read_whole(path: Path, most: int, *, dir_fd: int | None = None, look_on: LookOn | None = None) -> bytes:
    """The content of a plain file. `Damaged`: it has more than `most` bytes; nothing beyond them is read."""
    with plain_file(path, dir_fd=dir_fd) as fd:
        data = read_fd(fd, most + 1, look_on)
    if len(data) > most:
        raise Damaged(errno.EFBIG, f"it is longer than {most} bytes", os.fspath(path))
    return data


def read_start(path: Path, most: int, *, dir_fd: int | None = None) -> bytes:
    """The first bytes of a plain file, at most so many. `/proc` has plain files, too."""
    with plain_file(path, dir_fd=dir_fd) as fd:
        return read_fd(fd, most)


def read_end(path: Path, most: int) -> bytes:
    """The last bytes that the file had when it was opened, at most so many."""
    with plain_file(path) as fd:
        os.lseek(fd, max(os.fstat(fd).st_size - most, 0), os.SEEK_SET)
        return read_fd(fd, most)


def read_fd(fd: int, most: int, look_on: LookOn | None = None) -> bytes:
    """What is left to read, at most so much."""
    pieces: list[bytes] = []
    left = most
    while left > 0:
        if look_on is not None:
            look_on()
        piece = os.read(fd, min(left, PIECE))
        if not piece:
            break
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


@contextmanager
def plain_file(path: Path, *, dir_fd: int | None = None) -> Iterator[int]:
    """The file, open for reading. `Damaged`: it is none. Other `OSError`s are as `os.open` has them."""
    try:
        fd = os.open(path, FLAGS, dir_fd=dir_fd)
    except ValueError as error:  # a NUL in its name
        raise Damaged(errno.EINVAL, "its name is none") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise Damaged(errno.EINVAL, "it is not a plain file", os.fspath(path))
        yield fd
    finally:
        os.close(fd)


def names(folder: Path | int, most: int) -> list[str]:
    """Some of the names in the folder, at most so many, in no order. The others are not even listed."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in islice(entries, most)]
