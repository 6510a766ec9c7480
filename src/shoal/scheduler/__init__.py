"""(snapshot, policy, now) -> plan, with an explanation for every no.

Pure and deterministic: never talks to an engine, never reads a clock, never changes the snapshot.
A `planner` follows the facts in its `book`: `capacity` of the nodes, `rows` of those who wait. A `cycle` asks
`gang` and `fit` where somebody fits and `soonest` when, and keeps `claims` for whoever is promised a start.
`preempt` makes room for those who have the `rights` to it, from `victims` by what their end loses.
When somebody will start is asked of futures that the planner makes: `ahead` is one of them, `predict` has
several, `calibration` makes an interval of them, and `changes` rehearses what could be asked for instead.
`replacement` is where one share of an attempt goes on whose node was lost.
"""

from shoal.scheduler.eligible import explain_unmet
from shoal.scheduler.impossible import impossible, missed
from shoal.scheduler.outlook import Basis, Outlook
from shoal.scheduler.planner import Planner, plan
from shoal.scheduler.policy import Policy
from shoal.scheduler.replacement import replacement
from shoal.scheduler.snapshot import Candidate, GpuView, Holding, NodeView, Snapshot, UnmetDependency
from shoal.scheduler.stamps import Stamps
from shoal.scheduler.types import Eviction, Explanation, Ground, Plan, Promise, Start, Why

__all__ = [
    "Basis",
    "Candidate",
    "Eviction",
    "Explanation",
    "GpuView",
    "Ground",
    "Holding",
    "NodeView",
    "Outlook",
    "Plan",
    "Planner",
    "Policy",
    "Promise",
    "Snapshot",
    "Stamps",
    "Start",
    "UnmetDependency",
    "Why",
    "explain_unmet",
    "impossible",
    "missed",
    "plan",
    "replacement",
]
