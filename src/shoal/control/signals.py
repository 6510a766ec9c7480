"""How one loop wakes another."""

from __future__ import annotations

import anyio


class Signal:
    """A flag that is raised from anywhere in the loop's thread and lowered by who waits for it."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    @property
    def is_raised(self) -> bool:
        """May be asked from any thread."""
        return self._event.is_set()

    def set(self) -> None:
        self._event.set()

    async def wait(self, timeout_s: float) -> None:
        """Until it is raised or the time is over, then lower it."""
        with anyio.move_on_after(timeout_s):
            await self._event.wait()
        self._event = anyio.Event()
