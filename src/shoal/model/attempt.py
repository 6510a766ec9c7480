"""An attempt: one try at a job, with its states and the resources that each state holds.

`blame_order` picks the cause among the failures that nodes report. Pure.
"""

from __future__ import annotations

import signal
from enum import StrEnum

import msgspec

from shoal.model.evidence import Evidence
from shoal.wire import EndKind, Recovery, TaskOutcome, WrittenFiles

MAX_WRITTEN = 1 << 53
"""An upper bound, because a node can report any number."""


class AttemptState(StrEnum):
    QUEUED = "queued"
    """Holds nothing. Waits to be placed."""
    STARTING = "starting"
    """Holds its allocation. The engine may not have received the attempt, so submitting it again is safe."""
    RUNNING = "running"
    """Holds its allocation. Every supervisor has reported that its ranks started."""
    STOPPING = "stopping"
    """Holds its allocation until there is evidence that none of its processes run."""
    ENDED = "ended"
    """Holds nothing. Final."""


HOLDING = (AttemptState.STARTING, AttemptState.RUNNING, AttemptState.STOPPING)
"""States that hold resources."""


class EndReason(StrEnum):
    SUCCEEDED = "succeeded"
    EXIT = "exit"
    """A rank exited with a code other than 0."""
    SIGNAL = "signal"
    """A signal that Shoal did not send killed a rank."""
    OOM = "oom"
    """The attempt reached its memory limit."""
    SETUP = "setup"
    """Unpacking, mounting or the `setup` command failed."""
    WORLD = "world"
    """Its ranks did not form one process group. The job is not retried, because the same program would do the
    same.
    """
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    """Stopped to make room for a drain or for a more important job."""
    REFUSED = "refused"
    """The engine refused the attempt. No process was started."""
    LOST = "lost"
    """A supervisor or its node is gone, with evidence."""
    FENCED = "fenced"
    """Silent for longer than its fence, so its supervisors have certainly stopped their ranks."""
    DEPENDENCY = "dependency"
    """A job that this one depends on ended in a way that can never satisfy the dependency."""


CLUSTER_REASONS = frozenset({EndReason.PREEMPTED, EndReason.LOST, EndReason.FENCED})
"""Ends that are not the program's fault. The attempt is repeated and does not count against the job's
`retry`.
"""


class NodeTask(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The part of an attempt that runs on one node, and the resources it holds there."""

    node: str
    cpus: float
    memory_bytes: int
    disk_bytes: int = 0
    gpu_ids: tuple[int, ...] = ()
    gpu_milli: int = 1000
    """Thousandths of its one GPU, which other tasks may share. 1000 if the task has several GPUs."""
    charged_millicpus: int = 0
    """CPUs charged to the project because the task's memory keeps more CPUs from other jobs than it asked
    for; else 0.
    """

    @property
    def num_gpus(self) -> float:
        """The number of GPUs. A part of a GPU counts as a fraction."""
        return len(self.gpu_ids) * self.gpu_milli / 1000


Allocation = tuple[NodeTask, ...]


class TaskReplacement(msgspec.Struct, frozen=True, kw_only=True):
    """A lost task, and the task that was started in its place in the same attempt."""

    rendezvous_round: int
    """The rendezvous round that the new task was started for."""
    at: float
    lost: TaskOutcome
    node: str
    """The node of the new task: the same node or another."""

    @property
    def number(self) -> int:
        """The new task's replacement number. No two tasks of a node have the same."""
        return self.rendezvous_round


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    attempt_id: str
    job_id: str
    project: str
    epoch: int
    """The fencing number. It grows with every attempt of a job, and every component refuses an older one."""
    state: AttemptState = AttemptState.QUEUED
    queued_at: float
    backoff_s: float = 0.0
    """Seconds after `queued_at` before the attempt may be placed."""
    is_growth: bool = False
    """The attempt before it was stopped only to start again on more nodes."""
    allocation: Allocation = ()
    native_id: str | None = None
    placed_at: float | None = None
    started_nodes: tuple[str, ...] = ()
    started_at: float | None = None
    rendezvous_round: int = 0
    """How often its ranks were restarted without a new attempt."""
    failure: TaskOutcome | None = None
    """Why the newest restart was needed: the likeliest cause that any node has reported."""
    replacements: tuple[TaskReplacement, ...] = ()
    """Replacements of lost tasks, in order."""
    num_excused: int = 0
    """Rounds that began while Shoal waited for the processes of a dead supervisor. Those processes explain
    the failures of these rounds.
    """
    recoveries: tuple[Recovery, ...] = ()
    """How each node recovered in the newest round, in order of arrival."""
    stop_reason: EndReason | None = None
    """Why Shoal asked the attempt to stop. Set only while stopping."""
    stop_asked_at: float | None = None
    grows_to: int | None = None
    """The number of nodes the job continues with, if the attempt stops in order to grow."""
    outcomes: tuple[TaskOutcome, ...] = ()
    """What each node's supervisor reported, in order of arrival; at most one per node."""
    orphaned_nodes: tuple[str, ...] = ()
    """Nodes where the supervisor died, or may have died, before the ranks it started. No fence holds there,
    so only evidence counts, until the supervisor or the cluster contradicts the report.
    """
    doubted_nodes: tuple[str, ...] = ()
    """Those of the orphaned nodes that only the cluster reported. Only the cluster can withdraw such a
    report.
    """
    reason: EndReason | None = None
    exit_code: int | None = None
    message: str = ""
    ended_at: float | None = None
    version: int = 1

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(task.node for task in self.allocation)

    @property
    def nodes_left(self) -> tuple[str, ...]:
        """Nodes that may still run a part of the attempt."""
        ended = {outcome.node for outcome in self.outcomes}
        return tuple(name for name in self.node_names if name not in ended)

    @property
    def logged_nodes(self) -> tuple[str, ...]:
        """Every node that ever had a task of the attempt. The order only grows at its end."""
        first = list(self.node_names)
        for replacement in reversed(self.replacements):
            first[first.index(replacement.node)] = replacement.lost.node
        return tuple(dict.fromkeys((*first, *(replacement.node for replacement in self.replacements))))

    @property
    def nodes_to_start(self) -> tuple[str, ...]:
        """Nodes whose ranks have not been reported as started."""
        return tuple(name for name in self.nodes_left if name not in self.started_nodes)

    @property
    def restarts(self) -> int:
        """Rounds that began because ranks failed, not because a task was lost."""
        return self.rendezvous_round - len(self.replacements) - self.num_excused

    def replacement_on(self, node: str) -> int:
        """The replacement number of the node's present task. Earlier tasks of the node have ended."""
        return max(
            (replacement.number for replacement in self.replacements if replacement.node == node),
            default=0,
        )

    @property
    def written(self) -> WrittenFiles | None:
        """What its ranks wrote on all nodes and Shoal removes with the attempt. None if no node has reported
        it.
        """
        written = [outcome.written_files for outcome in self.outcomes if outcome.written_files is not None]
        if not written:
            return None
        folders = {files.folder for files in written}
        return WrittenFiles(
            num_files=min(sum(files.num_files for files in written), MAX_WRITTEN),
            num_bytes=min(sum(files.num_bytes for files in written), MAX_WRITTEN),
            names=tuple(dict.fromkeys(name[:200] for files in written for name in files.names))[:3],
            is_truncated=any(files.is_truncated for files in written),
            folder=folders.pop() if len(folders) == 1 else "",
        )

    @property
    def orphans_left(self) -> tuple[str, ...]:
        """Nodes where processes of the attempt may run without a supervisor."""
        return tuple(name for name in self.nodes_left if name in self.orphaned_nodes)

    def doubts_withdrawn_by(self, evidence: Evidence) -> tuple[str, ...]:
        """Nodes whose report of an orphan this evidence contradicts."""
        if Evidence.ORPHANED in evidence.rule.withdraws:
            return self.orphaned_nodes
        return self.doubted_nodes if Evidence.DOUBTFUL in evidence.rule.withdraws else ()


AFTERMATH = frozenset({signal.SIGABRT, signal.SIGTERM})
"""How ranks end after the loss of a peer or after a request to stop."""


def blame_order(outcome: TaskOutcome) -> tuple[int, float]:
    """Sort key for failures: the cause sorts first.

    A killed rank comes before a rank that gave up and before a node that waited in vain for another. Those
    come before a rank that Shoal stopped. Among equal failures the earliest comes first. The peers of a lost
    rank give up within milliseconds, and the report of their node may arrive first.
    """
    at = outcome.ended_at if outcome.failed_at is None else outcome.failed_at
    if outcome.kind is EndKind.STOPPED:
        return 2, at
    waits_in_vain = outcome.is_hang and outcome.rank is None
    is_aftermath = waits_in_vain or outcome.kind is EndKind.EXITED or outcome.signal in AFTERMATH
    return int(is_aftermath), at
