"""Pages of a log file: whole lines out of the bytes that were read."""

# The spool names its files by strings: a supervisor starts without pathlib.
from __future__ import annotations

import os

from shoal.engines.base import LogChunk

MAX_LINE = (64 << 10) + 128
"""A supervisor splits longer lines; its own prefix comes on top."""


def whole_lines(data: bytes, limit: int, *, is_final: bool) -> tuple[bytes, int]:
    """The page at the start of `data`, and how many bytes of the file it stands for.

    `data` should hold `limit + MAX_LINE` bytes where the file has them. As many whole lines as fit in
    `limit`, or one where it alone is longer. `is_final`: the file ends with `data` for ever, so an
    unfinished last line (its writer was killed) is given a newline of ours.
    """
    end = data.rfind(b"\n", 0, limit) + 1 or data.find(b"\n", limit) + 1
    if end:
        return data[:end], end
    if data and (is_final or len(data) >= limit + MAX_LINE):
        return data + b"\n", len(data)
    return b"", 0


MAX_PAGE = 4 << 20


def read_page(path: str, offset: int, limit: int, *, is_ended: bool) -> LogChunk:
    """One page of the log at `path`. `is_ended`: as asked before this call, nothing will be added to it."""
    offset, limit = max(offset, 0), min(max(limit, 1), MAX_PAGE)
    data, size = read_at(path, offset, limit + MAX_LINE)
    is_last = offset + len(data) >= size
    page, length = whole_lines(data, limit, is_final=is_ended and is_last)
    is_complete = is_ended and offset + length >= size
    return LogChunk(data=page, next_offset=offset + length, size=size, is_complete=is_complete)


def read_at(path: str, offset: int, length: int) -> tuple[bytes, int]:
    """Bytes of the file from `offset`, and how long it is; a file that is not there is empty."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return b"", 0
    try:
        size = os.fstat(fd).st_size
        return os.pread(fd, length, offset), size
    finally:
        os.close(fd)
