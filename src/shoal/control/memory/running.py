"""What the control plane remembers of attempts that hold resources. After a crash it learns it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.clock import Clock
from shoal.control.memory.attempt_table import AttemptMemories, AttemptMemory
from shoal.control.memory.leases import Leases
from shoal.control.memory.open_drills import OpenDrills
from shoal.control.memory.replica_reports import ReplicaReports
from shoal.control.memory.supervisor_reports import (
    CheckpointTimes,
    RankFailures,
    RendezvousPorts,
    ReportedWorlds,
    SingleFlight,
)
from shoal.model.attempt import Attempt
from shoal.model.evidence import Evidence
from shoal.scheduler import Planner
from shoal.wire import TaskOutcome


class LostTask(NamedTuple):
    """A task that has ended and that another node may take over."""

    outcome: TaskOutcome
    evidence: Evidence
    """The only evidence of the end."""


class RunningAttempts:
    """Used on the event loop, except for questions to `leases`, which transactions ask too."""

    def __init__(self, clock: Clock, planner: Planner) -> None:
        self._planner = planner
        self.attempts = AttemptMemories()
        self.leases = Leases(clock, self.attempts)
        self.single_flight = SingleFlight(self.attempts)
        self.rendezvous = RendezvousPorts(self.attempts)
        self.drills = OpenDrills(self.attempts)
        self.rank_failures = RankFailures(self.attempts)
        self.worlds = ReportedWorlds(self.attempts)
        self.replicas = ReplicaReports(self.attempts)
        self.checkpoint_times = CheckpointTimes(planner, self.attempts)
        self.submitting: set[str] = set()
        """Attempts that a loop hands to the engine at this moment. The loop that adds one removes it."""
        self.lost_tasks: dict[str, LostTask] = {}
        """By attempt id: a task that another node shall take over, or whose loss ends the attempt. If this is
        forgotten, the next pass of `watch` finds the loss again.
        """

    def follow(self, attempts: Sequence[Attempt]) -> None:
        """Follow these attempts, which hold resources, and forget every other one.

        This is the only place where an attempt is forgotten. A late message of an attempt that has ended
        makes a new memory of it, and the next call drops that too.
        """
        kept = {attempt.attempt_id for attempt in attempts} | self.submitting | self.drills.attempt_ids
        self.attempts.drop(
            lambda attempt_id, memory: attempt_id not in kept and not self._is_in_use(attempt_id, memory)
        )
        self.leases.follow(attempts)

    def _is_in_use(self, attempt_id: str, memory: AttemptMemory) -> bool:
        """Whether an attempt that has ended is still needed: its renewal is being answered, or the planner
        has not seen its end, and may record a decision that it made with the attempt's last checkpoint.
        """
        return bool(memory.speaking) or (memory.has_unrecorded_save and self._planner.holds(attempt_id))
