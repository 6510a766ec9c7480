"""Notice at once when a supervisor dies without a word: the kernel tells whoever holds its pidfd.

A hint for whoever looks, never evidence: that is the lock.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable

from shoal.runtime import spool


class Notice:
    """Followed shares. Safe to use from several threads; its own thread begins with the first listener."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._tell: Callable[[], None] | None = None
        self._epoll: select.epoll | None = None
        self._followed: dict[int, spool.Share] = {}
        """By pidfd."""

    def listen(self, tell: Callable[[], None]) -> None:
        with self._guard:
            self._tell = tell
            if self._epoll is None:
                self._epoll = select.epoll()
                threading.Thread(target=self._run, args=(self._epoll,), name="notice", daemon=True).start()

    def follow(self, share: spool.Share) -> None:
        """Tell when the process that claimed the share is gone. Call it once for each claim."""
        with contextlib.suppress(OSError), self._guard:
            claim = spool.read_claim(share)
            if self._epoll is None or claim is None or claim.boot_id != spool.boot_id():
                return
            pidfd = os.pidfd_open(claim.pid)
            if spool.start_ticks(claim.pid) != claim.start_ticks:
                os.close(pidfd)
                return
            self._followed[pidfd] = share
            self._epoll.register(pidfd, select.EPOLLIN)

    def close(self) -> None:
        """Say nothing any more. The thread sleeps until its process ends."""
        with self._guard:
            self._tell = None

    def _run(self, epoll: select.epoll) -> None:
        while True:
            for pidfd, _ in epoll.poll():
                with self._guard:
                    share, tell = self._followed.pop(pidfd), self._tell
                    epoll.unregister(pidfd)
                    os.close(pidfd)
                if tell is not None and not os.path.exists(share.outcome):  # noqa: PTH110
                    with contextlib.suppress(RuntimeError):  # the loop it would wake is closed
                        tell()
