"""What supervisors report with their renewals, in memory. After a restart of the control plane they report it
again.

`RendezvousPorts`: the port of each rendezvous round, as the first node announces it, and the renewals that
wait for it.

`SingleFlight`: one check of an attempt for each rendezvous round whose ranks fail, however many nodes report
it. After a restart one more check is made.

`RankFailures`: how the newest group of ranks failed on each node of an attempt, and which failure is the
cause. When a rank is killed, the ranks of other nodes exit because they lose their peer, and their
supervisors may report first. So a failure that looks like a program that gives up waits briefly for reports
of the other nodes. A supervisor repeats its report until it is answered.

`ReportedWorlds`: the process groups that running jobs have formed.

`CheckpointTimes`: when running attempts last saved their work.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping

import anyio

from shoal.model.attempt import Attempt, blame_order
from shoal.scheduler import Planner
from shoal.wire import Renewal, TaskOutcome, World


class RendezvousPorts:
    """Used on the event loop alone."""

    def __init__(self) -> None:
        self._ports: dict[str, tuple[int, int]] = {}
        self._news: dict[str, anyio.Event] = {}

    def announce(self, attempt_id: str, rendezvous_round: int, port: int) -> None:
        """Note the port that the first node opened for this round. A report of an older round changes
        nothing.
        """
        if self._ports.get(attempt_id, (-1, 0))[0] < rendezvous_round:
            self._ports[attempt_id] = (rendezvous_round, port)
            self.notify(attempt_id)

    def port(self, attempt_id: str, rendezvous_round: int) -> int | None:
        latest, port = self._ports.get(attempt_id, (-1, 0))
        return port if latest == rendezvous_round else None

    def notify(self, attempt_id: str) -> None:
        """Wake every renewal that waits for news of this attempt."""
        event = self._news.pop(attempt_id, None)
        if event is not None:
            event.set()

    async def wait_for_news(self, attempt_id: str, timeout_s: float) -> None:
        """Wait for news of the attempt, for at most `timeout_s`."""
        event = self._news.setdefault(attempt_id, anyio.Event())
        with contextlib.suppress(TimeoutError), anyio.fail_after(timeout_s):
            await event.wait()

    def keep_only(self, attempt_ids: Iterable[str]) -> None:
        """Forget attempts that hold nothing any more."""
        kept = set(attempt_ids)
        self._ports = {key: port for key, port in self._ports.items() if key in kept}


class SingleFlight:
    """Used on the event loop alone."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._done: dict[str, int] = {}
        """By attempt: the newest rendezvous round that was checked."""

    async def run(self, attempt_id: str, rendezvous_round: int, check: Callable[[], Awaitable[None]]) -> None:
        """Run the check, or wait until another caller has finished it. A check that raised does not count."""
        async with self._locks.setdefault(attempt_id, asyncio.Lock()):
            if self._done.get(attempt_id, -1) < rendezvous_round:
                await check()
                self._done[attempt_id] = rendezvous_round

    def keep_only(self, attempt_ids: Iterable[str]) -> None:
        """Forget attempts that hold nothing any more."""
        kept = set(attempt_ids)
        self._locks = {key: lock for key, lock in self._locks.items() if key in kept}
        self._done = {key: done for key, done in self._done.items() if key in kept}


OTHERS_S = 1.0
"""A supervisor notices the death of its rank within milliseconds, and reports it at once."""

RankGroupKey = tuple[str, int]
"""The id of an attempt, and the rendezvous round of its ranks."""


class RankFailures:
    """Used on the event loop alone."""

    def __init__(self) -> None:
        self._reports: dict[RankGroupKey, dict[str, TaskOutcome]] = {}
        self._news: dict[RankGroupKey, anyio.Event] = {}

    def note(self, failure: TaskOutcome, rendezvous_round: int) -> None:
        """Note how this group failed on a node. A repeated report changes nothing."""
        group = (failure.attempt_id, rendezvous_round)
        self._reports.setdefault(group, {})[failure.node] = failure
        if (event := self._news.pop(group, None)) is not None:
            event.set()

    def cause(self, attempt: Attempt, failure: TaskOutcome) -> TaskOutcome:
        """Return the likeliest cause of this group's failures, `failure` among them."""
        reports = self._reports.get((attempt.attempt_id, attempt.rendezvous_round), {})
        return min((failure, *reports.values()), key=blame_order)

    async def wait_for_others(self, attempt: Attempt, failure: TaskOutcome) -> None:
        """Return once every node has reported, or one has reported a better cause, or
        `OTHERS_S` have passed.
        """
        group = (attempt.attempt_id, attempt.rendezvous_round)
        with contextlib.suppress(TimeoutError), anyio.fail_after(OTHERS_S):
            while self.cause(attempt, failure).gives_up and not self._is_complete(attempt):
                await self._news.setdefault(group, anyio.Event()).wait()

    def keep_only(self, attempt_ids: Iterable[str]) -> None:
        """Forget attempts that hold nothing any more."""
        kept = set(attempt_ids)
        self._reports = {group: reports for group, reports in self._reports.items() if group[0] in kept}
        self._news = {group: event for group, event in self._news.items() if group[0] in kept}

    def _is_complete(self, attempt: Attempt) -> bool:
        reports = self._reports.get((attempt.attempt_id, attempt.rendezvous_round), {})
        return reports.keys() >= set(attempt.nodes_left)


class ReportedWorlds:
    """Used on the event loop alone."""

    def __init__(self) -> None:
        self._worlds: dict[tuple[str, str], World] = {}

    def note_renewal(self, renewal: Renewal) -> None:
        """Note the world of a task. Ranks that began again have formed no group at first."""
        task = (renewal.attempt_id, renewal.node)
        if renewal.world is None:
            self._worlds.pop(task, None)
        else:
            self._worlds[task] = renewal.world

    def of(self, attempt: Attempt) -> World | None:
        """Return the world of the whole attempt. If nodes report different ones, the world that misses most
        ranks.
        """
        ended = {outcome.node: outcome.world for outcome in attempt.outcomes}
        reported = (
            ended.get(node, self._worlds.get((attempt.attempt_id, node))) for node in attempt.node_names
        )
        worlds = [world for world in reported if world is not None]
        return min(worlds, key=lambda world: (world.is_whole, world.size), default=None)

    def keep_only(self, attempt_ids: Iterable[str]) -> None:
        """Forget attempts that hold nothing any more: their outcomes have it."""
        kept = set(attempt_ids)
        self._worlds = {task: world for task, world in self._worlds.items() if task[0] in kept}


MIN_STEP_S = 10.0
"""A smaller difference is jitter of the network and not another checkpoint."""


class CheckpointTimes:
    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._at: dict[str, float] = {}
        self.unrecorded: dict[str, float] = {}
        """Checkpoints reported since the last decision that stopped a job. The next such decision records
        them.
        """
        self.has_recorded = False
        """Whether any decision of this control plane was recorded with them. Before the first, only
        `unrecorded` is known, whatever an earlier control plane had heard and recorded.
        """

    def note_checkpoint(self, attempt_id: str, at: float) -> None:
        """Note that a node saw the attempt's work saved at that time. A gang's last checkpoint is the newest
        seen.
        """
        newest = self._at.get(attempt_id)
        if (newest is None or at > newest + MIN_STEP_S) and self._planner.save(attempt_id, at):
            self._at[attempt_id] = self.unrecorded[attempt_id] = at

    def keep_only(self, attempt_ids: Iterable[str]) -> None:
        """Forget everything about attempts that hold nothing any more."""
        kept = set(attempt_ids)
        self._at = {attempt_id: at for attempt_id, at in self._at.items() if attempt_id in kept}
        self.unrecorded = {
            attempt_id: at for attempt_id, at in self.unrecorded.items() if self._planner.holds(attempt_id)
        }

    def mark_recorded(self, saved: Mapping[str, float]) -> None:
        """Note that a decision was recorded with these."""
        self.has_recorded = True
        self.unrecorded = {
            attempt_id: at for attempt_id, at in self.unrecorded.items() if saved.get(attempt_id) != at
        }
