"""Find launchers that run inside of ranks though nothing of Shoal's let them.

The start hook makes a launcher its stand-in. Where the hook could not run, because a program was started with
an empty environment, the launcher starts processes of its own, which know of no other rank. So does `mpirun`
where a script names it by its path and has changed the variables that keep MPI from beginning.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from shoal import bounded_file
from shoal.runtime.warm import launchers, mpirun

MAX_PROCESSES = 1000
"""At one look. A look costs some 10 us for each; if there are more, the next look goes on with the others."""
MAX_BYTES = 64 << 10
MAX_ENVIRONMENT = 1 << 20
SEEN_S = 0.5
"""A launcher in Python is the real one for as long as its interpreter takes to start, then its stand-in."""
ASKS = ("-h", "--help", "-V", "--version", "-version")
"""As its first word: the launcher tells about itself and starts nothing."""
MPI = {name.partition(".")[0] for name in mpirun.NAMES}
MARKS = tuple(f"{name}=".encode() for name in (launchers.MARK, mpirun.WORLD))
"""One of them is in the environment of a launcher that Shoal has let run, and of what an MPI world starts."""


class OwnLaunchers:
    """What was seen of the processes of one node's ranks. `found` is the name of a launcher, or None."""

    def __init__(self) -> None:
        self.found: str | None = None
        self._last = 0
        self._others: dict[int, int] = {}
        """Hashes of command lines that are no launcher's. A process may have another one later, by `exec`."""
        self._seen_at: dict[int, float] = {}

    def look(self, pids: Iterable[int], now: float) -> None:
        """Look at those that may be launchers. A process of which nothing can be read is none."""
        living = set(pids)
        self._others = {pid: seen for pid, seen in self._others.items() if pid in living}
        self._seen_at = {pid: at for pid, at in self._seen_at.items() if pid in living}
        for pid in self._next(living):
            line = _read(pid, "cmdline", MAX_BYTES)
            if not line or hash(line) == self._others.get(pid):
                continue
            name = _launcher(pid, line)
            if name is None:
                self._others[pid] = hash(line)
                self._seen_at.pop(pid, None)
            elif name in MPI or now - self._seen_at.setdefault(pid, now) >= SEEN_S:
                self.found = name

    def _next(self, living: set[int]) -> list[int]:
        """As many as one look takes, those that it has not reached before the others."""
        chosen = sorted(living, key=lambda pid: (pid <= self._last, pid))[:MAX_PROCESSES]
        self._last = chosen[-1] if len(living) > MAX_PROCESSES else 0
        return chosen


def _launcher(pid: int, line: bytes) -> str | None:
    """The launcher that a process with this command line is; None: it is none, or Shoal lets it run."""
    words = line.decode(errors="replace").split("\0")[:-1]
    name, arguments = _named(words)
    if name is None or not arguments or arguments[0] in ASKS:
        return None
    marks = _read(pid, "environ", MAX_ENVIRONMENT).split(b"\0")
    return None if any(mark.startswith(MARKS) for mark in marks) else name


def _named(words: list[str]) -> tuple[str | None, list[str]]:
    program = words[0].rpartition("/")[2] if words else ""
    if program.startswith("python"):
        return launchers.named("python", words[1:])
    name = program.partition(".")[0]
    return (name if name in MPI else None), words[1:]


def _read(pid: int, name: str, most: int) -> bytes:
    """Empty for a process that has ended."""
    with contextlib.suppress(OSError):
        return bounded_file.read_start(f"/proc/{pid}/{name}", most)
    return b""
