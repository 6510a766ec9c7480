"""What the scheduler answers: which jobs start on which nodes, and why each other job does not."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from shoal.model.attempt import Allocation, NodeTask


class WaitReason(StrEnum):
    """The one dominant reason a job does not start. Stable: `--json` and dashboards rely on it."""

    DEPENDENCY = "dependency"
    """Jobs that it depends on have not ended."""
    BACKOFF = "backoff"
    """It failed, and waits before the next attempt."""
    ARRAY_LIMIT = "array_limit"
    """As many elements of its array run as the array allows."""
    NO_NODES = "no_nodes"
    """There is no node, or none is known because the cluster has not answered."""
    NEVER_FITS = "never_fits"
    """No set of nodes of this cluster could hold it, even if all were free."""
    NODES_CLOSED = "nodes_closed"
    """It would fit, but the nodes it needs are drained, cordoned or lost."""
    NODES_EXCLUDED = "nodes_excluded"
    """It would fit, but only on nodes that its own log rules excluded."""
    RESOURCES = "resources"
    """It waits for running jobs to release what it needs."""
    BEHIND = "behind"
    """What it needs is free, but reserved for a job that comes first."""
    QUOTA = "quota"
    """Its project, or one above it, uses its quota and all that it may borrow."""
    LIMIT = "limit"
    """Its project, or one above it, uses as much as its limit allows."""
    UNREACHABLE = "unreachable"
    """It was started, and no heartbeat has arrived since. Set by the control plane, not by a plan."""
    NOT_BEGUN = "not_begun"
    """It was placed, and its engine has not started it. Set by the control plane, not by a plan."""
    ORPHANED = "orphaned"
    """Its supervisor is dead, but processes of it are still alive. Set by the control plane, not by a
    plan."""
    MAKING_ROOM = "making_room"
    """Jobs that were evicted for it are stopping."""
    WINDOW = "window"
    """What it needs is free, but is in maintenance or reserved, or will be before the job must have ended."""
    POWER = "power"
    """Nodes are free, but their rack may not draw more power."""
    TOPOLOGY = "topology"
    """Enough nodes are free, but they are not close enough together."""
    FEWER_NODES = "fewer_nodes"
    """It runs, on fewer nodes than it could use."""


class PlannedStart(msgspec.Struct, frozen=True, kw_only=True):
    attempt_id: str
    allocation: Allocation


class PlannedReplacement(msgspec.Struct, frozen=True, kw_only=True):
    """Where an attempt that lost its task on one node continues."""

    attempt_id: str
    lost_node: str
    task: NodeTask | None
    """None: no other node can take it now. `Plan.explanations` says why."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """`sentence` stands alone, `details` are further lines, and `facts` are the numbers behind both."""

    attempt_id: str
    job_id: str
    why: WaitReason
    sentence: str
    details: tuple[str, ...] = ()
    hint: str | None = None
    facts: dict[str, Any] = {}


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """The start of a waiting job that follows from the time limits of running jobs. No job that starts before
    it delays it.
    """

    attempt_id: str
    job_id: str
    at: float | None
    """None: its nodes are reserved, but it is not known when the last of them is free."""
    nodes: tuple[str, ...]


class EvictionGround(StrEnum):
    """The rule that allows an eviction."""

    PRIORITY = "priority"
    """The candidate's class preempts, and the victim has a lower priority."""
    QUOTA = "quota"
    """The candidate's project is guaranteed devices that the victim's project borrowed."""
    GROWTH = "growth"
    """The attempt makes room for itself: it restarts on more nodes, which are idle."""


class Eviction(msgspec.Struct, frozen=True, kw_only=True):
    """A running attempt that is asked to stop, so that another can start."""

    attempt_id: str
    for_attempt_id: str
    ground: EvictionGround
    lost_s: float
    """At most this many seconds of its run are repeated, including the restart."""
    lost_device_s: float
    """The same for all devices it holds. CPUs count as parts of a GPU."""
    saved_at: float | None
    """Its last known checkpoint."""
    likely_device_s: float = 0.0
    """The expected loss, by which it was chosen. Less than `lost_device_s` if it has no known checkpoint but
    other attempts do."""
    num_nodes: int | None = None
    """With how many nodes it restarts, if it makes room for itself."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    replacements: tuple[PlannedReplacement, ...] = ()
    """One for each lost task."""
    starts: tuple[PlannedStart, ...] = ()
    promises: tuple[Promise, ...] = ()
    evictions: tuple[Eviction, ...] = ()
    """Attempts that are asked to stop. They hold their resources until they have stopped, and then these are
    reserved for the job named."""
    explanations: tuple[Explanation, ...] = ()
    """Why lost tasks are not replaced. Waiting attempts are explained on request."""
    replan_at: float | None = None
    """When another plan may differ from this one although nothing has happened."""

    @property
    def placements(self) -> tuple[PlannedReplacement | PlannedStart, ...]:
        """Replacements and starts, in the order of the decisions."""
        return (*self.replacements, *self.starts)
