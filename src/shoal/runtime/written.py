"""What the ranks wrote below their work directory, which is removed with the attempt.

Counts at the end of a share, when nothing of it runs any more. The tree is the job's and may be anything: the
walk goes by descriptors, follows no link and opens no file, and its time, depth and count are bounded.
"""

from __future__ import annotations

import contextlib
import os
import stat

import msgspec

from shoal.clock import BootClock
from shoal.wire import Written

CLOCK = BootClock()

MAX_ENTRIES = 20_000
MAX_DEPTH = 32
"""Each level holds a descriptor."""
MAX_S = 0.5
MAX_BYTES = 1 << 53
NAMED = 3
MAX_NAME = 200
NOT_RESULTS = frozenset({"__pycache__", ".ipynb_checkpoints", "node_modules"})
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class Mark(msgspec.Struct, frozen=True):
    """A moment by the clock of the file system that the work directory is on."""

    at_ns: int


def mark(directory: str) -> Mark | None:
    """Now, as files in that directory of ours are dated. None: it takes no file."""
    path = f"{directory}/began"
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            return Mark(os.fstat(fd).st_ctime_ns)
        finally:
            os.close(fd)
            os.unlink(path)
    return None


def count(work: str, since: Mark) -> Written | None:
    """Files with content that are newer than that. None: there are none, or nobody can say.

    What begins with a dot beside the job's files is a program's own: the directory is its HOME, too.
    """
    with contextlib.suppress(OSError):
        top = os.open(work, DIRECTORY)
        try:
            return _Walk(since.at_ns).run(top)
        finally:
            os.close(top)
    return None


class _Walk:
    def __init__(self, since_ns: int) -> None:
        self._since_ns = since_ns
        self._until = CLOCK.monotonic() + MAX_S
        self._num_seen = 0
        self._is_more = False
        self._num_files = 0
        self._num_bytes = 0
        self._largest: list[tuple[int, str]] = []
        self._folders: set[str] = set()
        """The top folders with files that were written; empty for a file that is in none."""
        self._older: set[str] = set()
        """Those with files that came with the job."""

    def run(self, top: int) -> Written | None:
        self._go_through(top, "", 0)
        if not self._num_files:
            return None
        folder = next(iter(self._folders)) if len(self._folders) == 1 else ""
        return Written(
            num_files=self._num_files,
            num_bytes=min(self._num_bytes, MAX_BYTES),
            names=tuple(name for _, name in self._largest),
            is_more=self._is_more,
            folder="" if folder in self._older or len(folder) > MAX_NAME else folder,
        )

    def _go_through(self, fd: int, above: str, depth: int) -> None:
        with contextlib.suppress(OSError), os.scandir(fd) as entries:
            for entry in entries:
                self._num_seen += 1
                if self._num_seen > MAX_ENTRIES or CLOCK.monotonic() > self._until:
                    self._is_more = True
                    return
                if entry.name in NOT_RESULTS or (not above and entry.name.startswith(".")):
                    continue
                with contextlib.suppress(OSError):
                    self._look(fd, entry.name, above, depth)

    def _look(self, fd: int, name: str, above: str, depth: int) -> None:
        """`OSError`: it is gone, or may not be entered."""
        facts = os.stat(name, dir_fd=fd, follow_symlinks=False)
        path = f"{above}/{name}" if above else name
        if stat.S_ISREG(facts.st_mode):
            self._add(path, facts)
        elif stat.S_ISDIR(facts.st_mode):
            if depth >= MAX_DEPTH:
                self._is_more = True
                return
            inner = os.open(name, DIRECTORY, dir_fd=fd)
            try:
                self._go_through(inner, path, depth + 1)
            finally:
                os.close(inner)

    def _add(self, path: str, facts: os.stat_result) -> None:
        folder, slash, _ = path.partition("/")
        top = _text(folder) if slash else ""
        if facts.st_ctime_ns <= self._since_ns:
            self._older.add(top)
            return
        if facts.st_size == 0 or path.endswith((".pyc", ".lock")):
            return
        self._num_files += 1
        self._num_bytes += facts.st_size
        self._folders.add(top)
        self._largest = sorted([*self._largest, (facts.st_size, _text(path))], reverse=True)[:NAMED]


def _text(name: str) -> str:
    """A job's names need not be text, and may be longer than anybody reads."""
    told = os.fsencode(name).decode(errors="replace")
    return told if len(told) <= MAX_NAME else f"{told[: MAX_NAME - 1]}…"
