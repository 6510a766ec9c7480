"""The keeper that forked a supervisor, as that one sees it: its end is the end of the share.

When a keeper is killed its cluster calls the job over, and may find no more than the keeper itself. What
ranks have started would be nobody's: the supervisor, to whom it falls, ends it first, and then itself. So the
kernel does not kill it for its keeper's death, but tells it. One that does not look is killed by a thread of
its own, and its ranks with it, by the kernel; then what those have started lives on.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

from shoal.runtime import kernel

TOLD_BY = signal.SIGRTMIN
"""Nobody else sends it. Who does wakes the supervisor up once, for nothing."""
LOOK_S, UNSEEN_S = 5.0, 15.0
"""How long the end of the keeper may be unseen: longer than a loop of the supervisor's that does not look."""


class Kept:
    """Main thread only, of a process that is killed with its parent until `listen`: no end is missed."""

    def __init__(self, keeper: int) -> None:
        self._keeper = keeper
        self._is_seen = threading.Event()

    def listen(self) -> None:
        """From here on the keeper's end is told instead of being ours."""
        signal.signal(TOLD_BY, _only_wake)
        threading.Thread(target=self._die_unseeing, name="kept", daemon=True).start()
        kernel.hear_of_parents_end(TOLD_BY)

    @property
    def is_over(self) -> bool:
        """Whether the keeper is dead. Whoever asks ends the share for it."""
        if os.getppid() == self._keeper:
            return False
        self._is_seen.set()
        return True

    def _die_unseeing(self) -> None:
        while os.getppid() == self._keeper:
            time.sleep(LOOK_S)
        if not self._is_seen.wait(UNSEEN_S):
            os.kill(os.getpid(), signal.SIGKILL)


def _only_wake(signum: int, frame: FrameType | None) -> None:
    """The wake-up descriptor has already done the work."""
