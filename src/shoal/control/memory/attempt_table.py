"""What is remembered of attempts while they hold resources: one object for each attempt, in one table.

`Leases` and the classes of `supervisor_reports.py`, `open_drills.py` and `replica_reports.py` each use some
of its fields. None of them keeps anything by attempt itself, so an attempt is forgotten in one place:
`RunningAttempts.follow`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import anyio

from shoal.wire import ActivitySigns, Progress, ReplicaStatus, TaskOutcome, World

TaskKey = tuple[str, int]
"""A node, and which replacement on it: the silence of a task does not count for the task that replaces it."""


@dataclass(slots=True, eq=False)
class AttemptMemory:
    """Everything that this control plane remembers of one attempt."""

    alive_at: dict[TaskKey, float] = field(default_factory=dict)
    """When each task last gave a sign of life, on the monotonic clock."""
    spoke_at: dict[TaskKey, float] = field(default_factory=dict)
    """The same, but only signs from the node itself. A cluster's word holds off a fence and does nothing
    else.
    """
    followed_since: dict[TaskKey, float] = field(default_factory=dict)
    """Since when this control plane follows the tasks that may run."""
    speaking: Counter[TaskKey] = field(default_factory=Counter)
    """Tasks whose renewal is being answered now."""
    submitted_at: float | None = None
    running_since: float | None = None
    troubles: dict[str, str] = field(default_factory=dict)
    """Why a task has not begun, by node. The node is empty if the whole attempt could not be handed over."""
    queue_reasons: dict[str, str] = field(default_factory=dict)
    """The troubles of tasks that wait in the cluster's own queue."""

    port: tuple[int, int] | None = None
    """The newest rendezvous round whose port is announced, and the port."""
    news: anyio.Event | None = None
    """Set when renewals that wait for news of the attempt shall be answered."""
    check: asyncio.Lock | None = None
    """Held while a loss is looked for: see `SingleFlight`."""
    checked_round: int = -1
    """The newest rendezvous round for which that was done."""
    failures: dict[int, dict[str, TaskOutcome]] = field(default_factory=dict)
    """By rendezvous round: how its ranks failed on each node."""
    failure_news: dict[int, anyio.Event] = field(default_factory=dict)
    worlds: dict[str, World] = field(default_factory=dict)
    """By node: the process group that its ranks have formed."""

    saved_at: float | None = None
    """When the attempt last saved its work."""
    has_unrecorded_save: bool = False
    """Whether no decision was recorded with it."""

    progress: dict[str, Progress] = field(default_factory=dict)
    """By node, like the three below: what supervisors report of their ranks."""
    rounds: dict[str, int] = field(default_factory=dict)
    signs: dict[str, ActivitySigns] = field(default_factory=dict)
    first_renewal_at: dict[str, float] = field(default_factory=dict)

    replica_status: ReplicaStatus | None = None
    should_sleep: bool | None = None
    """Whether the replica's server should sleep. None until a turn has decided."""

    def wake_waiting(self) -> None:
        """Have the renewals that wait for news answered."""
        if self.news is not None:
            self.news.set()
            self.news = None


class AttemptMemories:
    """The memory of each attempt, by its id. Only the event loop changes it; any thread may read."""

    def __init__(self) -> None:
        self._memories: dict[str, AttemptMemory] = {}

    def __contains__(self, attempt_id: str) -> bool:
        return attempt_id in self._memories

    def __iter__(self) -> Iterator[str]:
        return iter(self._memories)

    def items(self) -> Iterator[tuple[str, AttemptMemory]]:
        yield from self._memories.items()

    def of(self, attempt_id: str) -> AttemptMemory:
        """Return the attempt's memory, to note something in it."""
        return self._memories.setdefault(attempt_id, AttemptMemory())

    def get(self, attempt_id: str) -> AttemptMemory:
        """Return the attempt's memory, to read it. It is empty and not in the table if nothing was noted."""
        return self._memories.get(attempt_id) or AttemptMemory()

    def drop(self, is_over: Callable[[str, AttemptMemory], bool]) -> None:
        """Forget every attempt that is over."""
        over = [attempt_id for attempt_id, memory in self._memories.items() if is_over(attempt_id, memory)]
        for attempt_id in over:
            self._memories.pop(attempt_id).wake_waiting()
