"""Where the ranks of a generation meet, as their first node says it, and who waits to hear of it.

In memory: a supervisor says it again with every renewal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import anyio


class Meetings:
    """Used on the event loop alone."""

    def __init__(self) -> None:
        self._ports: dict[str, tuple[int, int]] = {}
        self._news: dict[str, anyio.Event] = {}

    def say(self, attempt_id: str, generation: int, port: int) -> None:
        """The first node opened this port for this generation. An older one changes nothing."""
        if self._ports.get(attempt_id, (-1, 0))[0] < generation:
            self._ports[attempt_id] = (generation, port)
            self.tell(attempt_id)

    def port(self, attempt_id: str, generation: int) -> int | None:
        known, port = self._ports.get(attempt_id, (-1, 0))
        return port if known == generation else None

    def tell(self, attempt_id: str) -> None:
        """There is news for everybody who waits for some about this attempt."""
        event = self._news.pop(attempt_id, None)
        if event is not None:
            event.set()

    async def news(self, attempt_id: str, timeout_s: float) -> None:
        """Wait for news about the attempt, or for so long."""
        event = self._news.setdefault(attempt_id, anyio.Event())
        with contextlib.suppress(TimeoutError), anyio.fail_after(timeout_s):
            await event.wait()

    def keep_only(self, attempt_ids: Iterable[str]) -> None:
        """Forget attempts that hold nothing any more."""
        kept = set(attempt_ids)
        self._ports = {key: port for key, port in self._ports.items() if key in kept}
