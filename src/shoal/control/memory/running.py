"""What the control plane remembers of attempts that hold resources. After a crash it learns it again."""

from __future__ import annotations

from typing import NamedTuple

from shoal.clock import Clock
from shoal.control.memory.leases import Leases
from shoal.control.memory.open_drills import OpenDrills
from shoal.control.memory.supervisor_reports import (
    CheckpointTimes,
    RankFailures,
    RendezvousPorts,
    ReportedWorlds,
    SingleFlight,
)
from shoal.scheduler import Planner
from shoal.wire import TaskOutcome


class LostTask(NamedTuple):
    """A task that has ended and that another node may take over."""

    outcome: TaskOutcome
    fence_s: float | None = None
    """Set if the only evidence of the end is that this fence has passed: see `Leases.fenced_nodes`."""
    is_declared: bool = False
    """Whether the only evidence of the end is an operator's word: see `is_still_dead`."""


class RunningAttempts:
    """Used on the event loop, except for questions to `leases`, which transactions ask too."""

    def __init__(self, clock: Clock, planner: Planner) -> None:
        self.leases = Leases(clock)
        self.single_flight = SingleFlight()
        self.rendezvous = RendezvousPorts()
        self.drills = OpenDrills()
        self.rank_failures = RankFailures()
        self.worlds = ReportedWorlds()
        self.checkpoint_times = CheckpointTimes(planner)
        self.submitting: set[str] = set()
        """Attempts that a loop hands to the engine at this moment."""
        self.lost_tasks: dict[str, LostTask] = {}
        """By attempt id: a task that another node shall take over, or whose loss ends the attempt. If this is
        forgotten, the next pass of `watch` finds the loss again.
        """
