"""One look at an attempt for each generation whose ranks fail, however many of its nodes tell of it.

In memory: after a restart one more look is taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable


class Looks:
    """Used on the event loop alone."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._done: dict[str, int] = {}
        """By attempt: the newest generation that was looked at."""

    async def once(self, attempt_id: str, generation: int, look: Callable[[], Awaitable[None]]) -> None:
        """Look, or wait until whoever came first has looked. One that raised is none."""
        async with self._locks.setdefault(attempt_id, asyncio.Lock()):
            if self._done.get(attempt_id, -1) < generation:
                await look()
                self._done[attempt_id] = generation

    def keep_only(self, attempt_ids: Iterable[str]) -> None:
        """Forget attempts that hold nothing any more."""
        kept = set(attempt_ids)
        self._locks = {key: lock for key, lock in self._locks.items() if key in kept}
        self._done = {key: done for key, done in self._done.items() if key in kept}
