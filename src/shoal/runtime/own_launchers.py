"""Find launchers that run inside of ranks though nothing of Shoal's let them.

The start hook makes a launcher its stand-in. Where the hook could not run, because a program was started with
an empty environment, the launcher starts processes of its own, which know of no other rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from shoal.runtime.warm import launchers

MAX_PROCESSES = 1000
MAX_BYTES = 64 << 10
LOOKS = 3
"""What has been something else so often does not become a launcher: it is not looked at again."""
SEEN_S = 0.5
"""A launcher is the real one for as long as its interpreter takes to start, and then its stand-in."""


class OwnLaunchers:
    """What was seen of the processes of one node's ranks. `found` is the name of a launcher, or None."""

    def __init__(self) -> None:
        self.found: str | None = None
        self._looks: dict[int, int] = {}
        self._seen_at: dict[int, float] = {}

    def look(self, pids: Iterable[int], now: float) -> None:
        """Look at those that may be launchers. A process of which nothing can be read is none."""
        living = set(pids)
        self._looks = {pid: count for pid, count in self._looks.items() if pid in living}
        self._seen_at = {pid: at for pid, at in self._seen_at.items() if pid in living}
        new = [pid for pid in sorted(living) if self._looks.get(pid, 0) < LOOKS]
        for pid in new[:MAX_PROCESSES]:
            name = _launcher(pid)
            if name is None:
                self._looks[pid] = self._looks.get(pid, 0) + 1
                self._seen_at.pop(pid, None)
            elif now - self._seen_at.setdefault(pid, now) >= SEEN_S:
                self.found = name


def _launcher(pid: int) -> str | None:
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(MAX_BYTES).decode(errors="replace").split("\0")
        if not words[0].rpartition("/")[2].startswith("python"):
            return None
        name, _ = launchers.named("python", words[1:-1])
        if name is None:
            return None
        with open(f"/proc/{pid}/environ", "rb") as file:
            marks = file.read(1 << 20).split(b"\0")
        is_marked = any(mark.startswith(launchers.MARK.encode() + b"=") for mark in marks)
        return None if is_marked else name
    return None
