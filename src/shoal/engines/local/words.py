"""What a supervisor said last, for the message of a share's end and for its log.

A supervisor that could not start, or died, has no other way to be heard.
"""

# The spool names its files by strings: a supervisor starts without pathlib.

from __future__ import annotations

import contextlib
import os

from shoal import bounded_file

MAX_BYTES = 4096
MAX_LINES = 20
NUM_QUOTED = 3
MAX_QUOTED = 400
"""Lines and characters in a message; the log has all of them."""


def last_words(path: str) -> list[str]:
    """The last lines of the file that say something, without control characters; none if it is not there."""
    with contextlib.suppress(OSError):
        text = bounded_file.read_end(path, MAX_BYTES).decode(errors="replace")
        lines = ["".join(c if c.isprintable() else " " for c in line).rstrip() for line in text.splitlines()]
        return [line for line in lines if line][-MAX_LINES:]
    return []


def quoted(words: list[str]) -> str:
    """The end of it, as much as a message holds."""
    return "\n".join(line.strip() for line in words[-NUM_QUOTED:])[-MAX_QUOTED:]


def append_to_log(path: str, at: float, lines: list[str]) -> None:
    """Add Shoal's own lines to a share's log that nobody writes any more. A disk that is full loses them."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        try:
            size = os.fstat(fd).st_size
            glue = b"" if size == 0 or os.pread(fd, 1, size - 1) == b"\n" else b"\n"
            os.write(fd, glue + "".join(f"{at:.6f} - e {line}\n" for line in lines).encode())
        finally:
            os.close(fd)
