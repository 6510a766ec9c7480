"""What is known of services in memory: the newest table, what supervisors said last, what data planes count.

All of it can be thrown away: the table is made from what is recorded, and the others say it again.
"""

from __future__ import annotations

from collections.abc import Iterable

import anyio
import msgspec

from shoal.clock import Clock
from shoal.control.signals import Signal
from shoal.model.service import Service
from shoal.serving.table import Report, Table
from shoal.serving.traffic import FRESH_S, Sample, Stats, Traffic
from shoal.wire import Serving

EMPTY = Table(version=0)


class ServiceBook:
    """Used on the event loop alone."""

    def __init__(self) -> None:
        self.table = EMPTY
        self.url: str | None = None
        """Where the data plane of this machine listens; None: there is none."""
        self.taken_port: int | None = None
        """The port that it should have, if it listens at another."""
        self.said: dict[str, Serving] = {}
        """By attempt."""
        self._sleep: dict[str, bool] = {}
        """By attempt: whether its server should sleep; nothing where nobody has found out yet."""
        self.traffic = Traffic()
        self.waker = Signal()
        """Somebody has a reason to look at services at once."""
        self.publishing = anyio.Lock()
        """Held from reading what is recorded until it is told: an older table must not follow a newer one."""
        self._news = anyio.Event()
        self._reported = anyio.Event()
        self._drained: dict[str, int] = {}
        """By replica: the first table that says that it drains."""
        self._began: dict[str, tuple[tuple[int, int], Stats, Stats]] = {}
        """By service: the step of its rollout, and what was counted of both releases when it began."""
        self._baking: dict[str, tuple[tuple[int, int], float]] = {}
        """By service: the step that is watched, and since when on the clock that never jumps."""

    def heard(self, report: Report, now: float) -> None:
        """A data plane said what it counts; somebody who waits for a slot is looked at right away."""
        if report.epoch not in {"", self.table.epoch}:
            report = msgspec.structs.replace(report, version=0)  # of a history that is not ours
        self.traffic.heard(report, now)
        self._reported.set()
        self._reported = anyio.Event()
        if any(count.queued for count in report.counts):
            self.waker.set()

    def keep_only(self, attempt_ids: Iterable[str]) -> None:
        """Forget attempts that hold nothing any more."""
        kept = set(attempt_ids)
        self.said = {attempt_id: said for attempt_id, said in self.said.items() if attempt_id in kept}
        self._sleep = {attempt_id: order for attempt_id, order in self._sleep.items() if attempt_id in kept}

    def order_sleep(self, attempt_id: str, *, should_sleep: bool) -> bool:
        """Note whether its server should sleep; whether that is news."""
        known, self._sleep[attempt_id] = self._sleep.get(attempt_id), should_sleep
        return known != should_sleep

    def sleep_order(self, attempt_id: str) -> bool | None:
        """What its supervisor is still to be told; None: nothing, or it does so already."""
        order, said = self._sleep.get(attempt_id), self.said.get(attempt_id)
        return order if said is not None and order != said.is_asleep else None

    def load(self, service: Service, now: float) -> Sample | None:
        """The last whole second of it; None if nobody counted lately."""
        samples = self.traffic.samples(service.project, service.name)
        whole = [one for one in samples[-3:] if int(now) - FRESH_S <= one.at < int(now)]
        return whole[-1] if whole else None

    def publish(self, table: Table) -> None:
        """Give it to everybody who waits for a newer one."""
        self.table = table
        draining = {one.replica_id for of in table.services for one in of.replicas if one.is_draining}
        self._drained = {one: self._drained.get(one, table.version) for one in draining}
        self.traffic.forget((of.project, of.name) for of in table.services)
        self._news.set()
        self._news = anyio.Event()

    async def taken(self, clock: Clock) -> None:
        """Until every data plane that is not long gone said that it serves by the table as it is now."""
        version = self.table.version
        while not self.traffic.knows(version, clock.monotonic()):
            await self._reported.wait()

    def is_idle(self, replica_id: str, now: float) -> bool:
        """Whether every data plane knows that it drains, and has nothing left in it."""
        version = self._drained.get(replica_id)
        return version is not None and self.traffic.is_idle(replica_id, version, now)

    def since_step(self, service: Service) -> tuple[Stats, Stats]:
        """What was counted of the old and the new release since the rollout came to its step, or since we
        first looked at it.
        """
        rollout = service.rollout
        if rollout is None or not rollout.is_open:
            self._began.pop(service.service_id, None)
            return Stats(), Stats()
        numbers, step = (rollout.old, rollout.new), (rollout.new, rollout.step)
        old, new = (self.traffic.stats(service.project, service.name, number) for number in numbers)
        began = self._began.get(service.service_id)
        if began is None or began[0] != step:
            began = self._began[service.service_id] = (step, old, new)
        return old.since(began[1]), new.since(began[2])

    def watched_s(self, service: Service, at: float) -> float | None:
        """How long the step of its canary has been watched here; None: it is not.

        What was before our own start does not count: what was seen then is lost.
        """
        rollout = service.rollout
        if rollout is None or not rollout.is_open or rollout.baking_at is None:
            self._baking.pop(service.service_id, None)
            return None
        step, began = (rollout.new, rollout.step), self._baking.get(service.service_id)
        if began is None or began[0] != step:
            began = self._baking[service.service_id] = (step, at)
        return at - began[1]

    async def newer(self, than: int, timeout_s: float, epoch: str = "") -> Table | None:
        """The table, as soon as it is newer than that, or of another epoch; None after so long."""
        with anyio.move_on_after(timeout_s):
            while not self._is_news(than, epoch):
                await self._news.wait()
        return self.table if self._is_news(than, epoch) else None

    def _is_news(self, than: int, epoch: str) -> bool:
        table = self.table
        return table.version > than or (table is not EMPTY and epoch not in {"", table.epoch})
