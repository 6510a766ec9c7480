"""What the loops and the commands share: the store, the engine, the clock and what is only in memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import anyio

from shoal.clock import Clock
from shoal.control.absences import Absences
from shoal.control.backoff import Backoff
from shoal.control.checkpoints import Checkpoints
from shoal.control.drill_book import DrillBook
from shoal.control.failures import Failures
from shoal.control.foreseen import Foreseen
from shoal.control.known_nodes import KnownNodes
from shoal.control.known_projects import KnownProjects
from shoal.control.leases import Leases
from shoal.control.looks import Looks
from shoal.control.meetings import Meetings
from shoal.control.outage import Outages
from shoal.control.queue import Queue
from shoal.control.record import Recorder
from shoal.control.refusals import Refusals
from shoal.control.services.book import ServiceBook
from shoal.control.services.porches import Porches
from shoal.control.signals import Signal
from shoal.control.turns import Turns
from shoal.control.worlds import WorldBook
from shoal.engines.base import Engine
from shoal.ids import IdFactory
from shoal.scheduler import Planner, Policy, Stamps
from shoal.settings import Settings
from shoal.store import Store
from shoal.wire import NodeOutcome

RENEW_S = 5.0
"""How often a supervisor renews its lease."""


NEWS_PATIENCE_S = 0.05
"""While the store is busy, word of a start lets ends and plans pass: they make room and use it."""


class Lost(NamedTuple):
    """A share that is over, and may have another in its place on another node."""

    outcome: NodeOutcome
    fence_s: float | None = None
    """There is no other evidence of it than that this has passed: see `Leases.fenced_nodes`."""
    is_declared: bool = False
    """There is no other than an operator's word: see `is_still_dead`."""


class Core:
    """Nothing here that is not in the store or the engine matters after a crash."""

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
        """Signs job and supervisor tokens and seals secrets; lives outside the database."""
        self.random = random
        self.backoff = Backoff(clock)
        self.leases = Leases(clock)
        self.recorder = Recorder(new_id, clock.now, self.backoff, self.leases)
        self.looks = Looks()
        self.meetings = Meetings()
        self.drills = DrillBook()
        self.failures = Failures()
        self.services = ServiceBook()
        self.worlds = WorldBook()
        self.porches: Porches | None = None
        """Where nodes are other machines: how data planes come to replicas there."""
        self.submitting: set[str] = set()
        """Attempts being handed to the engine at this moment."""
        self.lost: dict[str, Lost] = {}
        """By attempt: a share to be replaced on another node, or else the attempt's end. The next look finds
        it again if it is forgotten."""
        self.placer = Signal()
        """Somebody wants a plan at once."""
        self.watcher = Signal()
        """Somebody has seen a reason to look at what runs at once."""
        self.term = 0
        """Of this control plane as the leader; 0 where there can be no other."""
        self.lead_confirmed_at = 0.0
        """When the database last said so, on the clock that never jumps."""
        self.deposed = anyio.Event()
        """Another leads."""
        self.control_urls: tuple[str, ...] = ()
        """Where supervisors find us, and the other control planes of the cluster after us."""
        self.planner = Planner(policy or Policy())
        self.checkpoints = Checkpoints(self.planner)
        self.projects = KnownProjects()
        self.stamps = Stamps()
        self.queue = Queue(self.planner, self.backoff, self.stamps)
        self.foreseen = Foreseen()
        self.anchored = 0
        """The newest event known to be written down outside the database."""
        self.anchored_copy = 0
        """The same, in the second place."""
        self.nodes = KnownNodes()
        self.absences = Absences(clock)
        self.outages = Outages(clock)
        self.turns = Turns(clock)
        self.choosing_uid = anyio.Lock()
        """Held while a project is made: its uid is looked up on the machine before the transaction."""
        self.refusals: Refusals = Refusals(clock.monotonic, clock.now)

    @property
    def urls_to_tell(self) -> tuple[str, ...]:
        """What whoever speaks to us is to learn; nothing where there is nobody but us."""
        return self.control_urls if len(self.control_urls) > 1 else ()

    def archive_path(self, digest: str) -> str:
        """Where the snapshot of a workdir is kept; the digest was checked when it came in."""
        return str(Path(self.settings.state_dir) / "archives" / f"{digest}.tar")
