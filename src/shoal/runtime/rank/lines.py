"""The connections of this process's groups, and how to cut them.

A collective that gloo has begun cannot be taken back, and neither can the forming of a group. But both end at
once where a connection they wait on is cut, here and at the other end of it. So whoever leaves a broken group
cuts all it has of it: peers that wait for this rank, and would never hear of the one that was lost, notice.
And a thread cuts them for a rank that is inside of such a wait when its supervisor tells of the next group.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed import distributed_c10d

LOOK_S = 0.05

Known = dict[int, int]
"""Sockets by descriptor: their inodes, since a number may be another one's by the time it is used."""


class Lines:
    """What one process has open for the group of ranks it is in. Cutting may be done by any thread."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._generation = -1
        self._lines: Known = {}
        self._before: Known | None = None

    def begin(self, generation: int) -> None:
        """What is noted from now on is of this group."""
        with self._guard:
            self._generation, self._lines, self._before = generation, {}, None

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Sockets that are opened meanwhile are the group's, also while it is still being made."""
        with self._guard:
            is_outermost = self._before is None
            if is_outermost:
                self._before = _sockets()
        try:
            yield
        finally:
            if is_outermost:
                with self._guard:
                    self._take()
                    self._before = None

    def cut(self, before: float = math.inf) -> None:
        """End every connection of a group older than `before`. Whoever opened the descriptors closes them."""
        with self._guard:
            if self._generation >= before:
                return
            self._take()
            for fd, inode in self._lines.items():
                _cut(fd, inode)
            self._lines.clear()

    def follow(self, newest: Callable[[], int]) -> None:
        """Cut, from a thread of its own, whatever is of an older group than `newest` says."""

        def look() -> None:
            while True:
                time.sleep(LOOK_S)
                self.cut(newest())

        threading.Thread(target=look, name="shoal-lines", daemon=True).start()

    def _take(self) -> None:
        if self._before is not None:
            self._lines |= {fd: one for fd, one in _sockets().items() if self._before.get(fd) != one}


lines = Lines()
"""Of this process."""


@functools.cache
def watch_groups() -> None:
    """Note what every group is made of, those that the program makes too. Once for each process."""
    make = distributed_c10d._new_process_group_helper  # noqa: SLF001 - where all of them are made

    @functools.wraps(make)
    def noted(*args: Any, **more: Any) -> Any:
        with lines.noted():
            return make(*args, **more)

    distributed_c10d._new_process_group_helper = noted  # noqa: SLF001


def _sockets() -> Known:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def _cut(fd: int, inode: int) -> None:
    """If it still is that socket, and one of a network that does not listen."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as line:
        is_it = os.fstat(line.fileno()).st_ino == inode
        is_of_a_network = line.family in (socket.AF_INET, socket.AF_INET6)
        if is_it and is_of_a_network and not line.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            line.shutdown(socket.SHUT_RDWR)
