"""The store and the engine as the simulated control plane sees them: with a pause, and sometimes a
failure, before and after everything that lasts."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

from shoal.control.memory.supervisor_reports import SingleFlight
from shoal.engines.base import LogChunk, Observation, Submission
from shoal.engines.fake import FakeEngine
from shoal.errors import StoreUnavailable
from shoal.model.node import NodeFacts
from shoal.store import Store, Tx
from tests.sim.driver import Pause, run_now

SUBMIT_PAUSES = (1, 1, 1, 15)


class SimStore:
    """The disk outlives a crash; an answer does not."""

    def __init__(self, inner: Store, dice: random.Random) -> None:
        self.inner = inner
        self._dice = dice
        self.failure_chance = 0.0
        """Chance that a commit fails, as on a full disk."""
        self.commits = 0

    async def write(self, change: Callable[[Tx], Any], *, patience_s: float = 0.0) -> Any:
        await Pause()
        if self._dice.random() < self.failure_chance:
            raise StoreUnavailable("no space left on device")
        try:
            answer = run_now(self.inner.write(change))
        finally:
            self.commits += 1
        await Pause()
        return answer

    async def read(self, query: Callable[[Tx], Any]) -> Any:
        await Pause()
        return run_now(self.inner.read(query))

    def on_commit(self, callback: Callable[[int], None]) -> None:
        """The simulation decides itself when loops wake."""

    async def close(self) -> None:
        """The world closes the disk."""


class SimSingleFlight(SingleFlight):
    """No event loop to wait in: who comes while another looks takes a look of its own."""

    async def run(self, attempt_id: str, rendezvous_round: int, check: Callable[[], Awaitable[None]]) -> None:
        await check()


class SimEngine:
    """The fake engine with time passing around each call."""

    name = "fake"
    can_replace_tasks = True

    def __init__(self, inner: FakeEngine, dice: random.Random) -> None:
        self._inner = inner
        self._dice = dice

    async def submit(self, submission: Submission) -> str:
        """The slowest call: much may happen between the decision and its arrival."""
        for _ in range(self._dice.choice(SUBMIT_PAUSES)):
            await Pause()
        native_id = await self._inner.submit(submission)
        await Pause()
        return native_id

    async def cancel(self, attempt_id: str, grace_s: float) -> None:
        await Pause()
        await self._inner.cancel(attempt_id, grace_s)
        await Pause()

    async def list_owned(self) -> list[Observation]:
        await Pause()
        seen = await self._inner.list_owned()
        await Pause()
        return seen

    async def forget(self, attempt_id: str) -> None:
        await Pause()
        await self._inner.forget(attempt_id)
        await Pause()

    async def nodes(self) -> list[NodeFacts]:
        await Pause()
        return await self._inner.nodes()

    async def read_log(self, attempt_id: str, node: str, offset: int, limit: int) -> LogChunk:
        return await self._inner.read_log(attempt_id, node, offset, limit)

    async def close(self) -> None:
        """Nothing to let go of."""
