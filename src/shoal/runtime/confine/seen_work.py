"""The processor time of a share where no control group counts it: of the processes that are seen at looks.

Most users of a Slurm may make no control groups, and their ranks hang no less than others. What lives for
less than a look is counted when its parent has waited for it; nothing is counted too low for long.
"""

from __future__ import annotations

import contextlib
import os

from shoal.runtime import tree

SCAN_S = 1.0
"""How often processes are looked for, among all of the machine. No silence that short is a hang."""


class SeenWork:
    """Main thread only."""

    def __init__(self) -> None:
        self._scanned_at = float("-inf")
        self._pids: set[int] = set()
        self._known: dict[tuple[int, int], int] = {}
        """Ticks so far, by process and when it began: numbers are used again."""
        self._ticks = 0

    def seconds(self) -> float:
        """Never less than before, whoever has ended since."""
        now = tree.CLOCK.monotonic()
        if now > self._scanned_at + SCAN_S:
            self._scanned_at = now
            with contextlib.suppress(OSError):  # no descriptor is left, say: those that are known do, for now
                self._pids = tree.descendants(os.getpid())
        found = {}
        for pid in self._pids:
            if (told := tree.ticks_of(pid)) is not None:
                began, ticks = told
                found[pid, began] = ticks
                self._ticks += max(0, ticks - self._known.get((pid, began), 0))
        self._known = found
        return self._ticks / os.sysconf("SC_CLK_TCK")
