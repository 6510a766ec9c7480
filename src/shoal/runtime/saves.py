"""When a job last saved its work: the newest file in its checkpoint directory that nobody is writing.

Looks from a thread of its own: a file system that hangs must not keep the lease from being renewed.
"""

from __future__ import annotations

import contextlib
import os
import threading

from shoal.clock import Clock

EVERY_S = 20.0
SETTLED_S = 20.0
"""A file that changed since may be half a checkpoint: then nothing new is known yet."""
MAX_ENTRIES = 4096
MAX_DEPTH = 3


class Saves:
    def __init__(self, directory: str, clock: Clock) -> None:
        self._directory = directory
        self._clock = clock
        self._saved_at: float | None = None

    def start(self) -> None:
        """Begin to look. Once."""
        threading.Thread(target=self._run, name="saves", daemon=True).start()

    @property
    def age_s(self) -> float | None:
        """How long ago the last one was; None: nobody has seen any. An age, since clocks differ."""
        return None if self._saved_at is None else max(self._clock.now() - self._saved_at, 0.0)

    def look(self) -> None:
        newest = newest_write(self._directory)
        if newest is not None and newest <= self._clock.now() - SETTLED_S:
            self._saved_at = newest

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            self.look()
            pause.wait(EVERY_S)


def newest_write(directory: str) -> float | None:
    """When any file there was last written, going by so many of them; links are not followed."""
    newest, left, folders = -1.0, MAX_ENTRIES, [(directory, 0)]
    while folders and left > 0:
        path, depth = folders.pop()
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            for entry in entries:
                left -= 1
                if left <= 0:
                    break
                if entry.is_dir(follow_symlinks=False):
                    if depth < MAX_DEPTH:
                        folders.append((entry.path, depth + 1))
                elif entry.is_file(follow_symlinks=False):
                    newest = max(newest, entry.stat(follow_symlinks=False).st_mtime)
    return newest if newest >= 0 else None
