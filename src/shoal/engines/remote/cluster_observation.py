"""What a cluster says of one task and of one machine's boot, and what that proves. Pure.

The date of a boot proves little, because it moves when a person sets the clock. A later boot of another
machine with the same name proves nothing about the first machine. A value that is not known is no evidence.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from shoal.model.evidence import Evidence

MARGIN_S = 600.0
"""Tolerance for clocks that are set: munge alone lets Slurm's clock differ by five minutes."""
JITTER_S = 60.0
"""How much the date of one boot may differ between reports, as it is computed from the uptime."""


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """One start of one machine, as the cluster reports it each time."""

    machine: str = ""
    """What distinguishes the machine from others of the same name; empty if unknown."""
    boot_id: str = ""
    """The kernel's boot id; empty if the cluster does not report it, and then `at` has to do."""
    at: float | None = None
    """When the machine started, by the clock that reports it each time."""

    def follows(self, before: Boot) -> bool:
        """Return whether the same machine was certainly restarted after `before`. No process outlives
        that.
        """
        if not self.machine or self.machine != before.machine:
            return False
        if self.boot_id or before.boot_id:
            return bool(self.boot_id and before.boot_id) and self.boot_id != before.boot_id
        return self.at is not None and before.at is not None and self.at > before.at + MARGIN_S

    def is_on(self, machine: str) -> bool:
        """Return whether this may be a boot of that machine."""
        return not self.machine or self.machine == machine

    def is_like(self, other: Boot | None) -> bool:
        """Return whether it reports the same boot. The dates of one boot are never quite equal."""
        if other is None or (self.machine, self.boot_id) != (other.machine, other.boot_id):
            return False
        if self.at is None or other.at is None:
            return self.at is other.at
        return abs(self.at - other.at) < JITTER_S


class ClusterTaskState(StrEnum):
    """The state of a task, as the cluster reports it."""

    QUEUED = "queued"
    RUNNING = "running"
    SUSPENDED = "suspended"
    ENDED = "ended"
    UNKNOWN = "unknown"
    """The cluster has no trace of the task."""
    AWAY = "away"
    """The cluster could not be asked."""


class ClusterObservation(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster's report of one task; `raw` is its own text."""

    state: ClusterTaskState = ClusterTaskState.UNKNOWN
    raw: str = ""
    evidence: Evidence = Evidence.UNKNOWN
    """One of `PROVABLE`. What the cluster believes is in `state` and is no evidence."""
    stranded_reason: str = ""
    """Why the resources that the task waits for do not come here, though they might elsewhere; empty: they
    may."""


PROVABLE = (
    Evidence.UNKNOWN,
    Evidence.CLEARED,
    Evidence.DOUBTFUL,
    Evidence.ORPHANED_PER_CLUSTER,
    Evidence.ENDED,
)
"""What a cluster can show of a task whose node agent is silent."""
PRESENT_STATES = (ClusterTaskState.QUEUED, ClusterTaskState.RUNNING, ClusterTaskState.SUSPENDED)
"""The cluster still has the started node agent."""
NO_TRACE = ClusterObservation(raw="the cluster has no trace of it")
ClusterObservations = dict[tuple[str, str], ClusterObservation]
"""By attempt and node."""
