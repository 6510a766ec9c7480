"""The capabilities of one control plane, built once from its store, engine, clock and settings."""

from __future__ import annotations

import os
from collections.abc import Callable

from shoal.clock import Clock
from shoal.control.capabilities import (
    Anchors,
    EngineLink,
    JobAdmission,
    Leadership,
    Planning,
    Records,
    Sealing,
    Serving,
    SubmissionInputs,
    Upkeep,
)
from shoal.control.memory.health import EngineOutages, LoopHealth, MissingNodeTimes
from shoal.control.memory.planner_input import PlannerNodes, PlannerProjects
from shoal.control.memory.queue import Backoff, JobQueue
from shoal.control.memory.refusals import Refusals
from shoal.control.memory.running import RunningAttempts
from shoal.control.memory.signals import Signals
from shoal.control.memory.start_predictions import StartPredictions
from shoal.control.record import AttemptRecorder
from shoal.control.services.state import ServiceState
from shoal.engines.base import Engine
from shoal.ids import IdFactory
from shoal.scheduler import Planner, Policy, Stamps
from shoal.settings import Settings
from shoal.store import Store


class Core:
    """The capabilities of one control plane. After a crash only the store and the engine matter.

    Only the modules that open a control plane, run its loops and serve its API take this object. All other
    functions take the capabilities that they use: see `capabilities.py`.
    """

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
        planner, stamps = Planner(policy or Policy()), Stamps()
        self.settings = settings
        self.backoff = Backoff(clock)
        self.running = RunningAttempts(clock, planner)
        recorder = AttemptRecorder(new_id, clock.now, self.backoff, self.running.leases)
        self.records = Records(store, recorder, new_id, clock)
        self.link = EngineLink(engine, EngineOutages(clock), MissingNodeTimes(clock))
        self.planning = Planning(
            planner=planner,
            queue=JobQueue(planner, self.backoff, stamps),
            nodes=PlannerNodes(),
            projects=PlannerProjects(),
            stamps=stamps,
            predictions=StartPredictions(),
        )
        self.signals = Signals()
        self.sealing = Sealing(key, random)
        self.leadership = Leadership()
        self.services = ServiceState()
        self.loop_health = LoopHealth(clock)
        self.anchors = Anchors(settings, self.sealing, self.loop_health)
        self.refusals = Refusals(clock.monotonic, clock.now)
        self.upkeep = Upkeep(self.records, self.running, self.link, self.signals)
        self.inputs = SubmissionInputs(settings, self.leadership, self.sealing)
        self.admission = JobAdmission(self.records, self.sealing, self.link, self.planning, settings)
        self.serving = Serving(self.services, self.records, self.sealing, settings)
