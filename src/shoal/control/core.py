"""The object that the loops and the commands share: the store, the engine, the clock and everything that is
only in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import anyio

from shoal.clock import Clock
from shoal.control.memory.health import EngineOutages, LoopHealth, MissingNodeTimes, Signal
from shoal.control.memory.leases import Leases
from shoal.control.memory.open_drills import OpenDrills
from shoal.control.memory.planner_input import PlannerNodes, PlannerProjects
from shoal.control.memory.queue import Backoff, JobQueue
from shoal.control.memory.refusals import Refusals
from shoal.control.memory.start_predictions import StartPredictions
from shoal.control.memory.supervisor_reports import (
    CheckpointTimes,
    RankFailures,
    RendezvousPorts,
    ReportedWorlds,
    SingleFlight,
)
from shoal.control.record import AttemptRecorder
from shoal.control.services.state import ServiceState, SidecarIdentities
from shoal.engines.base import Engine
from shoal.ids import IdFactory
from shoal.scheduler import Planner, Policy, Stamps
from shoal.settings import Settings
from shoal.store import Store
from shoal.wire import TaskOutcome

RENEW_S = 5.0
"""Interval at which a supervisor renews its lease."""


REPORT_PATIENCE_S = 0.05
"""While the store is busy, a report of a start lets ends and plans go first: ends make room and plans use it.
"""


class LostTask(NamedTuple):
    """A task that has ended and that another node may take over."""

    outcome: TaskOutcome
    fence_s: float | None = None
    """Set if the only evidence of the end is that this fence has passed: see `Leases.fenced_nodes`."""
    is_declared: bool = False
    """Whether the only evidence of the end is an operator's word: see `is_still_dead`."""


class Core:
    """Shared state of one control plane. After a crash only the store and the engine matter."""

    def __init__(
        self,
        *,
        store: Store,
        engine: Engine,
        clock: Clock,
        new_id: IdFactory,
        settings: Settings,
        key: bytes,
        random: Callable[[int], bytes] = os.urandom,
        policy: Policy | None = None,
    ) -> None:
        self.store = store
        self.engine = engine
        self.clock = clock
        self.new_id = new_id
        self.settings = settings
        self.key = key
        """Signs job and supervisor tokens and seals secrets. It lives outside the database."""
        self.random = random
        self.backoff = Backoff(clock)
        self.leases = Leases(clock)
        self.recorder = AttemptRecorder(new_id, clock.now, self.backoff, self.leases)
        self.single_flight = SingleFlight()
        self.rendezvous = RendezvousPorts()
        self.open_drills = OpenDrills()
        self.rank_failures = RankFailures()
        self.services = ServiceState()
        self.worlds = ReportedWorlds()
        self.sidecar_identities: SidecarIdentities | None = None
        """Certificates by which data planes reach replicas. Set only if nodes are other machines."""
        self.submitting: set[str] = set()
        """Attempts that a loop hands to the engine at this moment."""
        self.lost_tasks: dict[str, LostTask] = {}
        """By attempt id: a task that another node shall take over, or whose loss ends the attempt. If this is
        forgotten, the next pass of `watch` finds the loss again.
        """
        self.plan_signal = Signal()
        """Set when a loop or a command wants a plan at once."""
        self.watch_signal = Signal()
        """Set when something is a reason to look at running attempts at once."""
        self.term = 0
        """The term of this control plane as the leader; 0 if no other control plane can lead."""
        self.lead_confirmed_at = 0.0
        """When the database last confirmed the lead, on the monotonic clock."""
        self.deposed = anyio.Event()
        """Set once another control plane leads."""
        self.control_urls: tuple[str, ...] = ()
        """URLs for supervisors: this control plane first, then the other control planes of the cluster."""
        self.planner = Planner(policy or Policy())
        self.checkpoint_times = CheckpointTimes(self.planner)
        self.projects = PlannerProjects()
        self.stamps = Stamps()
        self.queue = JobQueue(self.planner, self.backoff, self.stamps)
        self.start_predictions = StartPredictions()
        self.anchored_seq = 0
        """Sequence number of the newest event that is written down outside the database."""
        self.anchored_copy_seq = 0
        """The same for the second place."""
        self.nodes = PlannerNodes()
        self.missing_nodes = MissingNodeTimes(clock)
        self.outages = EngineOutages(clock)
        self.loop_health = LoopHealth(clock)
        self.uid_lock = anyio.Lock()
        """Held while a project is created, because the search for a free uid on the machine precedes the
        transaction.
        """
        self.refusals: Refusals = Refusals(clock.monotonic, clock.now)

    @property
    def announced_urls(self) -> tuple[str, ...]:
        """The URLs that replies announce. Empty if this is the only control plane."""
        return self.control_urls if len(self.control_urls) > 1 else ()

    def archive_path(self, digest: str) -> str:
        """Path of the snapshot of a workdir. The digest was checked when it came in."""
        return str(Path(self.settings.state_dir) / "archives" / f"{digest}.tar")
