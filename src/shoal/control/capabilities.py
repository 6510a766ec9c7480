"""What loops and commands are given to work with. A signature says what a function may touch.

A capability is a few things that are used together. A function takes the one to three that it needs, or a
single part of one: `store: Store` says more than `records: Records`. Below stand the four sets that several
loops and commands share. `Core` builds all of them and is no argument of any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from shoal.clock import Clock
from shoal.control.memory.health import EngineOutages, LoopHealth, MissingNodeTimes
from shoal.control.memory.planner_input import PlannerNodes, PlannerProjects
from shoal.control.memory.queue import JobQueue
from shoal.control.memory.running import RunningAttempts
from shoal.control.memory.signals import Signals
from shoal.control.memory.start_predictions import StartPredictions
from shoal.control.record import AttemptRecorder
from shoal.control.services.state import ServiceState
from shoal.engines.base import Engine
from shoal.ids import IdFactory
from shoal.scheduler import Planner, Stamps
from shoal.settings import Settings
from shoal.store import Store


@dataclass(frozen=True)
class Records:
    """The store, and all that a change of it needs: ids, the time, and the one way to move an attempt."""

    store: Store
    recorder: AttemptRecorder
    new_id: IdFactory
    clock: Clock
    uid_lock: anyio.Lock = field(default_factory=anyio.Lock)
    """Held while a project is created, because the search for a free uid on the machine precedes the
    transaction.
    """


@dataclass
class EngineLink:
    """The engine, and what its answers and its silence say of the cluster."""

    engine: Engine
    outages: EngineOutages
    missing_nodes: MissingNodeTimes


@dataclass(frozen=True)
class Planning:
    """The planner, and the facts that it plans with."""

    planner: Planner
    queue: JobQueue
    nodes: PlannerNodes
    projects: PlannerProjects
    stamps: Stamps
    predictions: StartPredictions


@dataclass(frozen=True)
class Sealing:
    """The key that signs tokens and seals secrets, and the randomness for new ones."""

    key: bytes
    """It lives outside the database."""
    random: Callable[[int], bytes]


class Leadership:
    """Whether this control plane leads, and by which URLs supervisors find the leader."""

    def __init__(self) -> None:
        self.term = 0
        """The term of this control plane as the leader; 0 if no other control plane can lead."""
        self.confirmed_at = 0.0
        """When the database last confirmed the lead, on the monotonic clock."""
        self.deposed = anyio.Event()
        """Set once another control plane leads."""
        self.control_urls: tuple[str, ...] = ()
        """URLs for supervisors: this control plane first, then the other control planes of the cluster."""

    @property
    def announced_urls(self) -> tuple[str, ...]:
        """The URLs that replies announce. Empty if this is the only control plane."""
        return self.control_urls if len(self.control_urls) > 1 else ()


class Anchors:
    """The places outside the database that remember the end of the log, and how far each of them is."""

    def __init__(self, settings: Settings, sealing: Sealing, loop_health: LoopHealth) -> None:
        self.settings = settings
        self.sealing = sealing
        self.loop_health = loop_health
        """Where a place that cannot be used is reported, beside the loops that fail."""
        self.seq = 0
        """Sequence number of the newest event that the home remembers."""
        self.copy_seq = 0
        """The same for the second place."""


@dataclass(frozen=True)
class Upkeep:
    """What it takes to keep running attempts as they are recorded, whatever happens to their nodes."""

    records: Records
    running: RunningAttempts
    link: EngineLink
    signals: Signals


@dataclass(frozen=True)
class SubmissionInputs:
    """What submissions are made of besides the attempt: the settings, the URLs to report to, the key."""

    settings: Settings
    leadership: Leadership
    sealing: Sealing


@dataclass(frozen=True)
class JobAdmission:
    """What a job or service is checked against, and what it is recorded with once it is accepted."""

    records: Records
    sealing: Sealing
    link: EngineLink
    planning: Planning
    settings: Settings

    @property
    def engine(self) -> Engine:
        return self.link.engine


@dataclass(frozen=True)
class Serving:
    """The state of services, and what the table for data planes is made of."""

    services: ServiceState
    records: Records
    sealing: Sealing
    settings: Settings
