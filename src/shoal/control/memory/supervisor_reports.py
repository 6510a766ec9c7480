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
from collections.abc import Awaitable, Callable, Mapping

import anyio

from shoal.control.memory.attempt_table import AttemptMemories
from shoal.model.attempt import Attempt, blame_order
from shoal.scheduler import Planner
from shoal.wire import Renewal, TaskOutcome, World


class RendezvousPorts:
    """Used on the event loop alone."""

    def __init__(self, attempts: AttemptMemories) -> None:
        self._attempts = attempts

    def announce(self, attempt_id: str, rendezvous_round: int, port: int) -> None:
        """Note the port that the first node opened for this round. A report of an older round changes
        nothing.
        """
        memory = self._attempts.of(attempt_id)
        if memory.port is None or memory.port[0] < rendezvous_round:
            memory.port = (rendezvous_round, port)
            memory.wake_waiting()

    def port(self, attempt_id: str, rendezvous_round: int) -> int | None:
        latest, port = self._attempts.get(attempt_id).port or (-1, 0)
        return port if latest == rendezvous_round else None

    def notify(self, attempt_id: str) -> None:
        """Wake every renewal that waits for news of this attempt."""
        self._attempts.get(attempt_id).wake_waiting()

    async def wait_for_news(self, attempt_id: str, timeout_s: float) -> None:
        """Wait for news of the attempt, for at most `timeout_s`."""
        memory = self._attempts.of(attempt_id)
        event = memory.news = memory.news or anyio.Event()
        with contextlib.suppress(TimeoutError), anyio.fail_after(timeout_s):
            await event.wait()


class SingleFlight:
    """Used on the event loop alone."""

    def __init__(self, attempts: AttemptMemories) -> None:
        self._attempts = attempts

    async def run(self, attempt_id: str, rendezvous_round: int, check: Callable[[], Awaitable[None]]) -> None:
        """Run the check, or wait until another caller has finished it. A check that raised does not count."""
        memory = self._attempts.of(attempt_id)
        memory.check = memory.check or asyncio.Lock()
        async with memory.check:
            if memory.checked_round < rendezvous_round:
                await check()
                memory.checked_round = rendezvous_round


OTHERS_S = 1.0
"""A supervisor notices the death of its rank within milliseconds, and reports it at once."""


class RankFailures:
    """Used on the event loop alone."""

    def __init__(self, attempts: AttemptMemories) -> None:
        self._attempts = attempts

    def note(self, failure: TaskOutcome, rendezvous_round: int) -> None:
        """Note how this group failed on a node. A repeated report changes nothing."""
        memory = self._attempts.of(failure.attempt_id)
        memory.failures.setdefault(rendezvous_round, {})[failure.node] = failure
        if (event := memory.failure_news.pop(rendezvous_round, None)) is not None:
            event.set()

    def cause(self, attempt: Attempt, failure: TaskOutcome) -> TaskOutcome:
        """Return the likeliest cause of this group's failures, `failure` among them."""
        return min((failure, *self._reports(attempt).values()), key=blame_order)

    async def wait_for_others(self, attempt: Attempt, failure: TaskOutcome) -> None:
        """Return once every node has reported, or one has reported a better cause, or
        `OTHERS_S` have passed.
        """
        news = self._attempts.of(attempt.attempt_id).failure_news
        with contextlib.suppress(TimeoutError), anyio.fail_after(OTHERS_S):
            while self.cause(attempt, failure).gives_up and not self._is_complete(attempt):
                await news.setdefault(attempt.rendezvous_round, anyio.Event()).wait()

    def _is_complete(self, attempt: Attempt) -> bool:
        return self._reports(attempt).keys() >= set(attempt.nodes_left)

    def _reports(self, attempt: Attempt) -> dict[str, TaskOutcome]:
        """Return how the attempt's newest group failed, by node."""
        return self._attempts.get(attempt.attempt_id).failures.get(attempt.rendezvous_round, {})


class ReportedWorlds:
    """Used on the event loop alone."""

    def __init__(self, attempts: AttemptMemories) -> None:
        self._attempts = attempts

    def note_renewal(self, renewal: Renewal) -> None:
        """Note the world of a task. Ranks that began again have formed no group at first."""
        worlds = self._attempts.of(renewal.attempt_id).worlds
        if renewal.world is None:
            worlds.pop(renewal.node, None)
        else:
            worlds[renewal.node] = renewal.world

    def of(self, attempt: Attempt) -> World | None:
        """Return the world of the whole attempt. If nodes report different ones, the world that misses most
        ranks.
        """
        ended = {outcome.node: outcome.world for outcome in attempt.outcomes}
        newest = self._attempts.get(attempt.attempt_id).worlds
        reported = (ended.get(node, newest.get(node)) for node in attempt.node_names)
        worlds = [world for world in reported if world is not None]
        return min(worlds, key=lambda world: (world.is_whole, world.size), default=None)


MIN_STEP_S = 10.0
"""A smaller difference is jitter of the network and not another checkpoint."""


class CheckpointTimes:
    def __init__(self, planner: Planner, attempts: AttemptMemories) -> None:
        self._planner = planner
        self._attempts = attempts
        self.has_recorded = False
        """Whether any decision of this control plane was recorded with them. Before the first, only
        `unrecorded` is known, whatever an earlier control plane had heard and recorded.
        """

    def note_checkpoint(self, attempt_id: str, at: float) -> None:
        """Note that a node saw the attempt's work saved at that time. A gang's last checkpoint is the newest
        seen.
        """
        newest = self._attempts.get(attempt_id).saved_at
        if (newest is None or at > newest + MIN_STEP_S) and self._planner.save(attempt_id, at):
            memory = self._attempts.of(attempt_id)
            memory.saved_at, memory.has_unrecorded_save = at, True

    def unrecorded(self) -> dict[str, float]:
        """Return the checkpoints that were reported since the last decision that stopped a job. The next such
        decision records them.
        """
        return {
            attempt_id: memory.saved_at
            for attempt_id, memory in self._attempts.items()
            if memory.has_unrecorded_save and memory.saved_at is not None
        }

    def mark_recorded(self, saved: Mapping[str, float]) -> None:
        """Note that a decision was recorded with these."""
        self.has_recorded = True
        for attempt_id, memory in self._attempts.items():
            if saved.get(attempt_id) == memory.saved_at:
                memory.has_unrecorded_save = False
