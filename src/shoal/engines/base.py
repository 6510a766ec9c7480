"""The contract between engines and the control plane. `EngineContract` tests every engine against it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from typing import Protocol, runtime_checkable

import msgspec

from shoal.model.evidence import Evidence
from shoal.model.node import NodeFacts
from shoal.wire import TaskCredentials, TaskOutcome, TaskSpec


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt: a task spec for the supervisor of each node. One attempt id always has the same
    content.
    """

    attempt_id: str
    epoch: int
    task_specs: tuple[TaskSpec, ...]
    credentials: dict[str, TaskCredentials] = {}
    """By node. The credential of a supervisor is valid for its own node only."""
    archive_path: str | None = None
    """The snapshot of the work directory on the control plane's disk: a tar file named by its digest."""
    bootstrap_token: str = ""
    """The token with which supervisors on other machines fetch their task specs. It has no other use."""


CLUSTER_UNREACHABLE = "the cluster cannot be asked"
"""`raw` begins with this text if a task waits while its cluster does not answer."""


OBSERVABLE = tuple(
    evidence for evidence in Evidence if evidence not in (Evidence.FENCED, Evidence.DECLARED_DEAD)
)
"""The evidence that an engine can give. It knows no fence and no operator."""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One observation of one node's task. Late and repeated observations are normal."""

    attempt_id: str
    epoch: int
    node: str
    native_id: str
    evidence: Evidence
    """One of `OBSERVABLE`. ENDED comes with an `outcome`."""
    replacement: int = 0
    """Of the observed task: see `TaskSpec`."""
    started_at: float | None = None
    """Set after the ranks have started."""
    outcome: TaskOutcome | None = None
    raw: str = ""
    """The engine's own text, verbatim."""
    silent_s: float = 0.0
    """Seconds since the last report. Set only if the task is ALIVE because of a recent report."""


class LogChunk(msgspec.Struct, frozen=True, kw_only=True):
    r"""Whole lines of one node's log from an offset. Each line is `UNIXTIME RANK STREAM TEXT\n`.

    RANK is a number or `-` for Shoal's own words; STREAM is `o`, `e` or `s` (setup).
    """

    data: bytes
    next_offset: int
    size: int
    """The size of the log now, so that a reader can begin near its end."""
    is_complete: bool
    """Nothing will follow `next_offset`."""


class Engine(Protocol):
    """The seven operations of an engine.

    All may block on the cluster, none on a person. If the engine cannot ask the cluster, they raise
    `EngineUnreachable`, which says nothing about what happened.
    """

    name: str
    can_replace_tasks: bool
    """Whether `submit` starts a task again if its task spec has a greater replacement number than the
    task."""

    async def submit(self, submission: Submission) -> str:
        """Start a supervisor for every task spec and return the engine's own id.

        The control plane may call it again with the same attempt id after a crash. An engine that already has
        the attempt returns the first id and starts nothing, except replacements of lost tasks, if it can: a
        task with a greater replacement number, on a node whose older task has ended or that had none.

        `EngineRefused`: nothing was started, and trying again is useless. Its subclass `NodeGone`: the
        attempt
        may run on other nodes. `EngineUnreachable`: the result is unknown; ask `list_owned` first.
        """
        ...

    async def cancel(self, attempt_id: str, grace_s: float) -> None:
        """Ask the attempt to end: its ranks get SIGTERM, and `grace_s` later the whole process tree is
        killed.

        Returns at once; the end is observed, not returned. A repeated call or an unknown id does no harm.
        """
        ...

    async def list_owned(self) -> list[Observation]:
        """Return one observation for each attempt and node that was submitted and not forgotten, dead or
        alive.

        An attempt that is not listed was never started or was forgotten: nothing of it runs.
        """
        ...

    async def forget(self, attempt_id: str) -> None:
        """Stop listing an attempt whose end is recorded. Its logs stay readable. May be repeated."""
        ...

    async def nodes(self) -> list[NodeFacts]:
        """Return the nodes that exist now, with their hardware."""
        ...

    async def read_log(self, attempt_id: str, node: str, offset: int, limit: int) -> LogChunk:
        """Return about `limit` bytes of whole lines from `offset`. The log of an unknown id is empty and
        complete.
        """
        ...

    async def close(self) -> None:
        """Release the engine's own resources. Running jobs keep running."""
        ...


class SavedState(StrEnum):
    """What a checkpoint looks like from outside the job."""

    COMPLETE = "complete"
    """Every file exists in its full size."""
    VERIFIED = "verified"
    """Every file has the hash that its manifest names."""
    DAMAGED = "damaged"
    UNFINISHED = "unfinished"
    """Never committed: the job is still writing it, or has given it up."""
    UNCHECKED = "unchecked"
    """Committed, but not inspected: newer checkpoints used up the budget of this inspection."""


class SavedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint in a job's directory. A job can write anything there, so nothing of it is proven."""

    step: int
    epoch: int
    """The attempt that saved it."""
    rendezvous_round: int
    """The round of the ranks that saved it."""
    state: SavedState
    saved_at: float
    size_bytes: int
    name: str = ""
    """Its folder."""
    problem: str = ""
    world_size: int | None = None
    locations: tuple[str, ...] = ("directory",)
    """Where the job says that it put the checkpoint: `memory`, `directory`, or an address."""


class SaveDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The interval between the job's saves and the reason for it, as the job last reported."""

    reason: str
    """`every interval first cost`"""
    steps: int
    step_s: float
    cost_s: float | None
    written_s: float
    interval_s: float | None
    mtbf_s: float | None


class ProgramSave(msgspec.Struct, frozen=True, kw_only=True):
    """A file or folder that the program itself put into its directory. Its content is unknown."""

    name: str
    """The name of a folder ends in `/`."""
    saved_at: float
    """0 if it cannot be read."""
    size_bytes: int
    problem: str = ""
    """Why the size is not complete, as a sentence."""


class SavedCheckpoints(msgspec.Struct, frozen=True, kw_only=True):
    items: tuple[SavedCheckpoint, ...] = ()
    """Newest first."""
    decision: SaveDecision | None = None
    program_saves: tuple[ProgramSave, ...] = ()
    """Newest first."""
    num_program_saves: int = 0
    """The number that was seen in all."""
    is_truncated: bool = False
    """There may be more: the inspection stopped at its limit."""


@runtime_checkable
class SupportsCheckpoints(Protocol):
    """An engine that can inspect the checkpoint directories of jobs."""

    async def inspect_checkpoints(self, job_id: str, verify_s: float) -> SavedCheckpoints:
        """Return the content of a job's directory; nothing if it does not exist.

        For at most `verify_s` seconds, read and hash checkpoints, newest first; the others are not
        `verified`.
        `LimitReached`: another caller verifies checkpoints at this moment.
        """
        ...


@runtime_checkable
class SupportsCheckpointDir(Protocol):
    """An engine whose nodes keep checkpoint directories elsewhere than in this machine's home."""

    sharing_hint: str
    """The command an operator types so that nodes have a directory in common."""

    def checkpoint_dir(self, job_id: str) -> str | None:
        """Return the path of a job's directory, whether or not it exists.

        None: the nodes have no directory in common, and jobs that keep checkpoints are refused. Does not
        block.
        """
        ...


@runtime_checkable
class SupportsChangeNotices(Protocol):
    """An engine that notices the end of a supervisor without a query."""

    def notify_changes(self, callback: Callable[[], None]) -> None:
        """Call `callback`, from any thread, when a task seems to have ended without a report.

        The call is a reason to observe, not evidence. Only the last callback is called.
        """
        ...


@runtime_checkable
class SupportsPartitions(Protocol):
    """An engine whose nodes are divided into partitions. No attempt may have nodes of two partitions."""

    def common_label(self, require: Mapping[str, str], pools: Collection[str]) -> str | None:
        """Return the label whose value must be equal on all nodes of a gang that requires these labels.

        None: any nodes may be combined. `pools`: the pools of all known nodes. Does not block.
        """
        ...


@runtime_checkable
class SupportsReaping(Protocol):
    """An engine that cannot find out by itself that a silent task has ended."""

    async def reap(self, attempt_id: str) -> None:
        """Accept that the end of the whole attempt is recorded, though the engine still lists tasks of it.

        Tasks that still report are stopped. The other tasks are over and hold their nodes no longer. May be
        repeated.
        """
        ...


@runtime_checkable
class SupportsClearing(Protocol):
    """An engine that a person can tell that nothing is left running on a node."""

    def how_to_clear(self, node: str) -> str:
        """Return what to type, and when, as a clause; empty if the engine does not have the node. Does not
        block.
        """
        ...


@runtime_checkable
class SupportsOwnQueue(Protocol):
    """An engine with its own queue, in which submitted attempts may have to wait for jobs of others."""

    own_queue: str
    """The owner of that queue, for people: `Slurm`."""


@runtime_checkable
class SupportsPrune(Protocol):
    """An engine that keeps data of ended attempts on our disk and can remove it."""

    name: str

    async def prune(self, older_than: float, max_bytes: int) -> int:
        """Remove the logs of forgotten attempts that were last written before `older_than`.

        Then remove the oldest of the rest until they fit in `max_bytes`. Return the number of removed
        attempts. Nothing that may run is touched.
        """
        ...

    async def checkpoints(self) -> list[str]:
        """Return the ids of the jobs that have a checkpoint directory."""
        ...

    async def drop_checkpoint(self, job_id: str) -> None:
        """Remove the directory. The job must have ended. May be repeated."""
        ...
