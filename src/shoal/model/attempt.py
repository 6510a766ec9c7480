"""An attempt: one try at a job, with the states it passes and the resources each of them holds."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from shoal.wire import NodeOutcome, Recovery, Written

MAX_WRITTEN = 1 << 53
"""A node may say any number."""


class AttemptState(StrEnum):
    QUEUED = "queued"
    """Holds nothing. Waits to be placed."""
    STARTING = "starting"
    """Holds its allocation. The engine may or may not have it yet; submitting again is safe."""
    RUNNING = "running"
    """Holds its allocation. Every supervisor reported its ranks started."""
    STOPPING = "stopping"
    """Holds its allocation until there is evidence that nothing of it runs any more."""
    ENDED = "ended"
    """Holds nothing, for ever."""


HOLDING = (AttemptState.STARTING, AttemptState.RUNNING, AttemptState.STOPPING)
"""States that hold resources."""


class EndReason(StrEnum):
    SUCCEEDED = "succeeded"
    EXIT = "exit"
    """A rank exited with a code other than 0."""
    SIGNAL = "signal"
    """A rank was killed by a signal that was not ours."""
    OOM = "oom"
    """The memory limit was hit."""
    SETUP = "setup"
    """Unpacking, mounting or the `setup` command failed."""
    WORLD = "world"
    """Its ranks did not form one process group. Never tried again: the same program would do the same."""
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    """Asked to give way: to a drain, or to a more important job."""
    REFUSED = "refused"
    """The engine would not take it; nothing was started."""
    LOST = "lost"
    """A supervisor or its node is gone, with evidence."""
    FENCED = "fenced"
    """Silent for longer than its fence: its supervisors have certainly stopped it."""
    DEPENDENCY = "dependency"
    """A job it waits for ended in a way that can never satisfy it."""


CLUSTER_REASONS = frozenset({EndReason.PREEMPTED, EndReason.LOST, EndReason.FENCED})
"""Ends that are not the program's fault: repeated without counting against the job's `retry`."""


class NodeShare(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What an attempt holds on one node."""

    node: str
    cpus: float
    memory_bytes: int
    disk_bytes: int = 0
    gpu_ids: tuple[int, ...] = ()
    gpu_milli: int = 1000
    """Thousandths of its one GPU, which others may share; 1000 whenever there are several."""
    charged_millicpus: int = 0
    """Counted against its project where its memory keeps more CPUs from others than it asked for; else 0."""

    @property
    def num_gpus(self) -> float:
        """Parts count as parts."""
        return len(self.gpu_ids) * self.gpu_milli / 1000


Allocation = tuple[NodeShare, ...]


class Replacement(msgspec.Struct, frozen=True, kw_only=True):
    """A share that was lost, and the one that was begun in its place without a new attempt."""

    generation: int
    """The group it was begun for: the incarnation of the new share."""
    at: float
    lost: NodeOutcome
    node: str
    """Where the new one is: the same node, or another."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    attempt_id: str
    job_id: str
    project: str
    epoch: int
    """The fencing number: grows with every attempt of a job; a stale one is refused everywhere."""
    state: AttemptState = AttemptState.QUEUED
    queued_at: float
    backoff_s: float = 0.0
    """How long after `queued_at` it may be placed."""
    goes_on: bool = False
    """The one before it stopped for nothing but to start again on more nodes."""
    allocation: Allocation = ()
    native_id: str | None = None
    placed_at: float | None = None
    started_nodes: tuple[str, ...] = ()
    started_at: float | None = None
    generation: int = 0
    """How often its ranks were started anew without a new attempt."""
    failure: NodeOutcome | None = None
    """Why the newest of them was needed: the likeliest cause that any node has told of."""
    replacements: tuple[Replacement, ...] = ()
    """Of lost shares, in order."""
    excused: int = 0
    """Groups that began while what a dead supervisor left was waited for: that explains their failures."""
    recoveries: tuple[Recovery, ...] = ()
    """How each node came through the newest of them, in order of arrival."""
    stop_reason: EndReason | None = None
    """Set while stopping: why we asked."""
    stop_asked_at: float | None = None
    grows_to: int | None = None
    """With how many nodes its job goes on, where it stops for that."""
    outcomes: tuple[NodeOutcome, ...] = ()
    """What each node's supervisor reported, in order of arrival; at most one a node."""
    orphaned_nodes: tuple[str, ...] = ()
    """Where the supervisor died before what it had started, or may have: no fence passes there, only evidence
    counts, until somebody vouches for it again."""
    doubted_nodes: tuple[str, ...] = ()
    """Those of them of which the cluster said so, and nobody who is there: it alone may withdraw that."""
    reason: EndReason | None = None
    exit_code: int | None = None
    message: str = ""
    ended_at: float | None = None
    version: int = 1

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(share.node for share in self.allocation)

    @property
    def nodes_left(self) -> tuple[str, ...]:
        """Nodes that may still run something of it."""
        ended = {outcome.node for outcome in self.outcomes}
        return tuple(name for name in self.node_names if name not in ended)

    @property
    def logged_nodes(self) -> tuple[str, ...]:
        """Every node it ever had a share on, in an order that only grows at its end."""
        first = list(self.node_names)
        for one in reversed(self.replacements):
            first[first.index(one.node)] = one.lost.node
        return tuple(dict.fromkeys((*first, *(one.node for one in self.replacements))))

    @property
    def nodes_to_start(self) -> tuple[str, ...]:
        """Nodes whose ranks nobody has seen started."""
        return tuple(name for name in self.nodes_left if name not in self.started_nodes)

    @property
    def restarts(self) -> int:
        """Groups that began because ranks failed, not because a share was lost."""
        return self.generation - len(self.replacements) - self.excused

    def incarnation(self, node: str) -> int:
        """The group that the node's present share was begun for; others of the node are over."""
        return max((one.generation for one in self.replacements if one.node == node), default=0)

    @property
    def written(self) -> Written | None:
        """What its ranks wrote on all of its nodes and is removed with it; None: nothing, as far as known."""
        found = [outcome.written for outcome in self.outcomes if outcome.written is not None]
        if not found:
            return None
        folders = {one.folder for one in found}
        return Written(
            num_files=min(sum(one.num_files for one in found), MAX_WRITTEN),
            num_bytes=min(sum(one.num_bytes for one in found), MAX_WRITTEN),
            names=tuple(dict.fromkeys(name[:200] for one in found for name in one.names))[:3],
            is_more=any(one.is_more for one in found),
            folder=folders.pop() if len(folders) == 1 else "",
        )

    @property
    def orphans_left(self) -> tuple[str, ...]:
        """Nodes where something of it may live that nobody supervises."""
        return tuple(name for name in self.nodes_left if name in self.orphaned_nodes)
