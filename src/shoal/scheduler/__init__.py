"""(snapshot, policy, now) -> plan, with an explanation for every no.

Pure and deterministic: never talks to an engine, never reads a clock, never changes the snapshot.
One file a stage, in the order a cycle passes them: `order eligible capacity fit gang keep explain`.
"""

from shoal.scheduler.cycle import plan
from shoal.scheduler.eligible import explain_unmet
from shoal.scheduler.impossible import impossible
from shoal.scheduler.order import in_order
from shoal.scheduler.policy import Policy
from shoal.scheduler.snapshot import Candidate, GpuView, Holding, NodeView, Snapshot, UnmetDependency
from shoal.scheduler.types import Explanation, Plan, Start, Why

__all__ = [
    "Candidate",
    "Explanation",
    "GpuView",
    "Holding",
    "NodeView",
    "Plan",
    "Policy",
    "Snapshot",
    "Start",
    "UnmetDependency",
    "Why",
    "explain_unmet",
    "impossible",
    "in_order",
    "plan",
]
