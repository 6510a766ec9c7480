"""Turn a snapshot of the cluster into a plan, with an explanation for every job that does not start.

The scheduler is pure and deterministic. It never talks to an engine, never reads a clock and never changes
the snapshot.

`planner` receives the facts one by one and keeps them in `facts.cluster_state`. For each plan it runs one
`cycle`:

- `replacements` finds other nodes for lost tasks of running attempts, before any waiting candidate.
- `order` says which candidate is considered next: by priority, project standing, due time and score.
- `placement` finds the nodes on which a candidate fits now, or the earliest time at which nodes are free, and
  keeps capacity reservations for promised starts.
- `preemption` chooses running jobs to stop for a candidate that has the right to evict, and jobs that can
  grow.

After the plan, `explain` says why each remaining candidate waits. `prediction` plays futures with copies of
the planner to say when a waiting job will start, and which change of its request would start it sooner.
"""

from shoal.scheduler.explain.impossible import explain_impossible, missing_nodes_text
from shoal.scheduler.explain.limits import explain_unmet
from shoal.scheduler.facts.plan import (
    Eviction,
    EvictionGround,
    Explanation,
    Plan,
    PlannedReplacement,
    PlannedStart,
    Promise,
    WaitReason,
)
from shoal.scheduler.facts.policy import Policy
from shoal.scheduler.facts.snapshot import (
    Candidate,
    GpuInfo,
    Holding,
    NodeInfo,
    Snapshot,
    TaskLoss,
    UnmetDependency,
)
from shoal.scheduler.order.stamps import Stamps
from shoal.scheduler.planner import Planner, plan
from shoal.scheduler.prediction.outlook import Outlook, OutlookBasis

__all__ = [
    "Candidate",
    "Eviction",
    "EvictionGround",
    "Explanation",
    "GpuInfo",
    "Holding",
    "NodeInfo",
    "Outlook",
    "OutlookBasis",
    "Plan",
    "PlannedReplacement",
    "PlannedStart",
    "Planner",
    "Policy",
    "Promise",
    "Snapshot",
    "Stamps",
    "TaskLoss",
    "UnmetDependency",
    "WaitReason",
    "explain_impossible",
    "explain_unmet",
    "missing_nodes_text",
    "plan",
]
