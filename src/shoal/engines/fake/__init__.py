"""An engine in memory, on a virtual clock: for simulation and tests.

Nothing here waits, runs a process or reads the real time: every coroutine finishes when it is first
driven, so a simulator needs no event loop, and the same calls always give the same answers.
"""

from shoal.engines.fake.clock import VirtualClock
from shoal.engines.fake.cluster import FakeCluster, SentRenewal
from shoal.engines.fake.engine import FakeEngine
from shoal.engines.fake.faults import NO_FAULT, Fault, Faults, Verb, no_faults, seeded_faults
from shoal.engines.fake.script import Act, Script, always, by_run, seeded

__all__ = [
    "NO_FAULT",
    "Act",
    "FakeCluster",
    "FakeEngine",
    "Fault",
    "Faults",
    "Script",
    "SentRenewal",
    "Verb",
    "VirtualClock",
    "always",
    "by_run",
    "no_faults",
    "seeded",
    "seeded_faults",
]
