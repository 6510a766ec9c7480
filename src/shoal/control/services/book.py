"""What is known of services in memory: the newest table, what supervisors said last, what data planes count.

All of it can be thrown away: the table is made from what is recorded, and the others say it again.
"""

from __future__ import annotations

from collections.abc import Iterable

import anyio

from shoal.control.signals import Signal
from shoal.serving.table import Report, Table
from shoal.serving.traffic import Traffic
from shoal.wire import Serving

EMPTY = Table(version=0)


class ServiceBook:
    """Used on the event loop alone."""

    def __init__(self) -> None:
        self.table = EMPTY
        self.said: dict[str, Serving] = {}
        """By attempt."""
        self.traffic = Traffic()
        self.waker = Signal()
        """Somebody has a reason to look at services at once."""
        self._news = anyio.Event()

    def heard(self, report: Report, now: float) -> None:
        """A data plane said what it counts; somebody who waits for a slot is looked at right away."""
        self.traffic.heard(report, now)
        if any(count.queued for count in report.counts):
            self.waker.set()

    def keep_only(self, attempt_ids: Iterable[str]) -> None:
        """Forget attempts that hold nothing any more."""
        kept = set(attempt_ids)
        self.said = {attempt_id: said for attempt_id, said in self.said.items() if attempt_id in kept}

    def publish(self, table: Table) -> None:
        """Give it to everybody who waits for a newer one."""
        self.table = table
        self._news.set()
        self._news = anyio.Event()

    async def newer(self, than: int, timeout_s: float) -> Table | None:
        """The table, as soon as it is newer than that; None after so long."""
        with anyio.move_on_after(timeout_s):
            while self.table.version <= than:
                await self._news.wait()
        return self.table if self.table.version > than else None
