"""An engine in memory, on a virtual clock: for simulation and tests.

`engine.FakeEngine` is one control plane's view; it asks `scenario` for the fault of each call and passes
the call to `cluster.FakeCluster`. The cluster holds one `task.FakeTask` for each task, which passes through
its stages by a script of `scenario`. Tests change the cluster from outside (`cut`, `power_off`, `orphan`).

Nothing here waits, runs a process or reads the real time. Every coroutine finishes when it is first driven,
so a simulator needs no event loop, and the same calls always give the same replies.
"""

from shoal.engines.fake.cluster import FakeCluster, SentRenewal
from shoal.engines.fake.engine import FakeEngine
from shoal.engines.fake.scenario import (
    NO_FAULT,
    Act,
    Fault,
    Faults,
    Script,
    Verb,
    VirtualClock,
    always,
    by_run,
    no_faults,
    seeded,
    seeded_faults,
)

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
