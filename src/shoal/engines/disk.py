"""Read pages of whole lines from logs, and run disk work on threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

from shoal.engines.base import LogChunk
from shoal.errors import EngineUnreachable

MAX_LINE = (64 << 10) + 128
"""A supervisor splits longer lines; its own prefix comes on top."""


def whole_lines(data: bytes, limit: int, *, is_final: bool) -> tuple[bytes, int]:
    """Return the page at the start of `data`, and the number of bytes of the file that it stands for.

    `data` should hold `limit + MAX_LINE` bytes if the file has them. The page has as many whole lines as
    fit in `limit`, or one line that alone is longer. `is_final`: the file ends with `data` for ever, so
    an unfinished last line, whose writer was killed, gets a newline.
    """
    end = data.rfind(b"\n", 0, limit) + 1 or data.find(b"\n", limit) + 1
    if end:
        return data[:end], end
    if data and (is_final or len(data) >= limit + MAX_LINE):
        return data + b"\n", len(data)
    return b"", 0


MAX_PAGE = 4 << 20


def read_page(path: str, offset: int, limit: int, *, is_ended: bool) -> LogChunk:
    """Return one page of the log at `path`. `is_ended`: nothing was going to be added before this call."""
    offset, limit = max(offset, 0), min(max(limit, 1), MAX_PAGE)
    data, size = read_at(path, offset, limit + MAX_LINE)
    is_last = offset + len(data) >= size
    page, length = whole_lines(data, limit, is_final=is_ended and is_last)
    is_complete = is_ended and offset + length >= size
    return LogChunk(data=page, next_offset=offset + length, size=size, is_complete=is_complete)


def read_at(path: str, offset: int, length: int) -> tuple[bytes, int]:
    """Return bytes of the file from `offset`, and the size of the file. A missing file is empty."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return b"", 0
    try:
        size = os.fstat(fd).st_size
        return os.pread(fd, length, offset), size
    finally:
        os.close(fd)


T = TypeVar("T")


async def on_thread(work: Callable[[], T], failed: str, limiter: anyio.CapacityLimiter | None = None) -> T:
    """Run `work` on a thread. An `OSError` becomes `EngineUnreachable` with a message that begins with
    `failed`.
    """
    try:
        return await anyio.to_thread.run_sync(work, limiter=limiter)
    except OSError as error:
        raise EngineUnreachable(
            f"{failed}: {error.strerror or error}", hint="shoal doctor", errno=error.errno
        ) from error


__all__ = ["MAX_LINE", "read_page", "whole_lines"]
