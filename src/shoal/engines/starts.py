"""Have a cluster start keepers for orders that nobody has taken: whose, when again, and when no more.

A cluster may lose what it was given, so it is asked again; that this is safe is the desk's doing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Protocol, TypeVar

import anyio
import msgspec

from shoal.clock import Clock
from shoal.engines.base import Submission
from shoal.engines.desk import Desk, DeskShare
from shoal.engines.glimpses import NO_TRACE, THERE, Glimpses, Stage
from shoal.engines.reach import Reach
from shoal.errors import EngineRefused
from shoal.wire import EndKind, Order, Summons

T = TypeVar("T")
STARTS_AT_ONCE = 8
"""Of different owners. Those of one come one after the other: where what starts them is the owner's own
process, as `sbatch` may be, who stops it holds up nobody else."""
MAX_STARTS = 6
MAX_PAUSE_S = 60.0


class Tries(msgspec.Struct):
    """Of one attempt and incarnation."""

    tried: int = 0
    done: int = 0
    """How often the cluster took it."""
    not_before: float = 0.0
    """When it may be tried again (monotonic)."""


class Cluster(Protocol):
    """Of an engine what starts keepers: see `RemoteEngine`."""

    name: str
    devices_from: str
    can_follow: bool

    async def start(self, summons: Summons, orders: tuple[Order, ...]) -> None: ...

    async def look(self, shares: Collection[DeskShare]) -> Glimpses: ...

    async def on_thread(self, work: Callable[[], T]) -> T: ...


class Starts:
    """One per engine. How often something was tried is only in memory."""

    def __init__(self, cluster: Cluster, desk: Desk, clock: Clock, reach: Reach) -> None:
        self._cluster = cluster
        self._desk = desk
        self._clock = clock
        self._reach = reach
        self._tries: dict[tuple[str, int], Tries] = {}
        """By attempt and incarnation."""
        self._guards: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)
        """By owner: starts of one attempt must exclude each other."""
        self._at_once = anyio.CapacityLimiter(STARTS_AT_ONCE)

    def forget(self, attempt_id: str) -> None:
        """The desk has forgotten it."""
        self._tries = {key: tries for key, tries in self._tries.items() if key[0] != attempt_id}

    async def start(self, submission: Submission, *, is_new: bool) -> None:
        """Start keepers for orders that nobody has taken, unless the cluster still has what was started.

        May be repeated. `is_new`: the cluster was never asked for any of it.
        """
        if not is_new and not await self._due(submission):
            return  # nobody waits for those who start others
        async with self._guards[submission.orders[0].owner], self._at_once:
            for incarnation, (due, seen) in (await self._due(submission, is_new=is_new)).items():
                await self._start_one(submission, incarnation, due, seen)

    async def _due(
        self, submission: Submission, *, is_new: bool = False
    ) -> dict[int, tuple[list[DeskShare], Glimpses]]:
        """By incarnation: shares that nobody has, and nobody is on his way for; and what the cluster says."""
        waiting = [share for share in self._desk.find(submission.attempt_id).values() if share.is_waiting]
        seen = await self._cluster.look(waiting) if waiting and not is_new else {}
        found = {}
        for incarnation in sorted({share.order.incarnation for share in waiting}):
            due = [share for share in waiting if share.order.incarnation == incarnation]
            if not any(self._stage(share, seen) in THERE or self._has_heir(share) for share in due):
                found[incarnation] = due, seen
        return found

    async def _start_one(
        self, submission: Submission, incarnation: int, due: list[DeskShare], seen: Glimpses
    ) -> None:
        key, now = (submission.attempt_id, incarnation), self._clock.monotonic()
        tries = self._tries.setdefault(key, Tries())
        if now < tries.not_before:
            return
        if tries.done >= MAX_STARTS:
            said = {seen.get(share.place, NO_TRACE).raw for share in due}
            told = f"no supervisor fetched the order in {tries.done} tries: {'; '.join(sorted(said))}"
            await self._close(due, told)
            return
        tries.not_before = now + min(2.0**tries.tried, MAX_PAUSE_S)
        tries.tried += 1
        summons = Summons(
            attempt_id=submission.attempt_id,
            urls=tuple(dict.fromkeys((*self._reach.urls, *due[0].order.control_urls))),
            ca=self._reach.ca,
            ticket=submission.ticket,
            incarnation=incarnation,
            spool=self._reach.spool,
            devices_from=self._cluster.devices_from,
            can_follow=self._cluster.can_follow,
        )
        try:
            await self._cluster.start(summons, tuple(share.order for share in due))
        except EngineRefused as error:
            if tries.done == 0 and incarnation == 0:
                await self._cluster.on_thread(lambda: self._desk.withdraw(submission.attempt_id))
            if not self._desk.find(submission.attempt_id):
                raise
            # Others of it may run, or may begin yet: these alone are over.
            await self._close(due, f"{self._cluster.name} refused it: {error.message}")
            return
        tries.done += 1  # what was turned away for now is no try

    async def _close(self, shares: Collection[DeskShare], told: str) -> None:
        """Give up those that nobody has: nobody ever will."""
        for share in shares:
            await self._cluster.on_thread(lambda share=share: self._desk.close(share, EndKind.LOST, told))  # type: ignore[misc]

    def _has_heir(self, share: DeskShare) -> bool:
        return share.heir_until is not None and self._clock.monotonic() < share.heir_until

    def _stage(self, share: DeskShare, seen: Glimpses) -> Stage:
        return seen.get(share.place, NO_TRACE).stage
