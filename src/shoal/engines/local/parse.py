"""Pages of a log file: whole lines out of the bytes that were read. Pure."""

from __future__ import annotations

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
