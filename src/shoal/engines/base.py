"""What every engine offers the control plane, and what it may rely on. `EngineContract` judges them all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from typing import Protocol, runtime_checkable

import msgspec

from shoal.model.node import NodeFacts
from shoal.wire import Credentials, NodeOutcome, Order


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt, as an order for the supervisor of each node. The same id always has the same content."""

    attempt_id: str
    epoch: int
    orders: tuple[Order, ...]
    credentials: dict[str, Credentials] = {}
    """By node: a supervisor's credential is good for its own node alone."""
    archive_path: str | None = None
    """The workdir's snapshot on the control plane's disk, a tar file named by its digest."""
    ticket: str = ""
    """What supervisors on other machines fetch their orders with; of no use to who has none there."""


class Sight(StrEnum):
    """What an engine sees of one node's share of an attempt."""

    PENDING = "pending"
    """Taken, supervisor not yet seen alive."""
    ALIVE = "alive"
    """The supervisor lives."""
    ENDED = "ended"
    """Evidence that nothing of it runs any more; `outcome` is set."""
    ORPHANED = "orphaned"
    """The supervisor is dead, and what it left lives or cannot be told dead. Nobody is left to keep the
    fence, so however long this lasts, or is not seen again, it is no end: only ENDED is."""
    DOUBTFUL = "doubtful"
    """Silent, and something on its node does not die that may be of it. The supervisor may live all the same,
    cut off: nothing is stopped for it. But nobody may be left to keep the fence, so it is no end either."""
    UNKNOWN = "unknown"
    """We could not look. Not evidence of anything."""


CANNOT_ASK = "the cluster cannot be asked"
"""How the raw words begin that an engine has of what waits while its cluster does not answer."""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One look at one node's share of one attempt. Late and repeated looks are normal."""

    attempt_id: str
    epoch: int
    node: str
    native_id: str
    sight: Sight
    incarnation: int = 0
    """Of the share that was seen: see `Order`."""
    started_at: float | None = None
    """Set once the ranks were started."""
    outcome: NodeOutcome | None = None
    raw: str = ""
    """The engine's own words, kept verbatim."""
    is_hearsay: bool = False
    """The cluster says so, and nobody who is there: that it is ALIVE, ORPHANED or DOUBTFUL."""
    is_cleared: bool = False
    """Of one that is UNKNOWN: the cluster does not say, or no longer, that something does not die there. If
    hearsay made it ORPHANED or DOUBTFUL, and nothing else, its fence counts again."""
    is_queued: bool = False
    """It waits in the cluster's own queue, however long: nothing of it runs, and who is started for it
    asks us before it begins."""
    silent_s: float = 0.0
    """Of one that is ALIVE because it was heard from lately: how long ago."""


class LogChunk(msgspec.Struct, frozen=True, kw_only=True):
    r"""Whole lines of one node's log from an offset. Each line is `UNIXTIME RANK STREAM TEXT\n`.

    RANK is a number or `-` for Shoal's own words; STREAM is `o`, `e` or `s` (setup).
    """

    data: bytes
    next_offset: int
    size: int
    """How many bytes the log has now, so that one can begin near its end."""
    is_complete: bool
    """Nothing will ever follow `next_offset`."""


class Engine(Protocol):
    """Seven verbs. All may block on the cluster, none on a person; all raise `EngineUnreachable`
    when they could not ask, which says nothing about what happened.
    """

    name: str
    can_replace_shares: bool
    """Whether `submit` begins a share anew where an order has a greater incarnation than the share has."""

    async def submit(self, submission: Submission) -> str:
        """Start a supervisor for every order and return the engine's own id.

        May be called again after a crash with the same attempt id: an engine that already has it returns
        the first id and starts nothing, but shares in place of lost ones where it can: a share of a greater
        incarnation on a node whose older one has ended, or on one that had none. `EngineRefused`: nothing
        was started and trying again is useless; its `NodeGone`: but on other nodes it may run.
        `EngineUnreachable`: we do not know; ask `list_owned` first.
        """
        ...

    async def cancel(self, attempt_id: str, grace_s: float) -> None:
        """Ask for its end: the ranks get SIGTERM, and `grace_s` later the whole process tree is killed.

        Returns at once; the end is observed, not returned. Repeating it, or an id nobody knows, is fine.
        """
        ...

    async def list_owned(self) -> list[Observation]:
        """Everything submitted and not forgotten, dead or alive, one observation per attempt and node.

        An attempt that is not listed was never started, or was forgotten: nothing of it runs.
        """
        ...

    async def forget(self, attempt_id: str) -> None:
        """Its end is recorded: stop listing it. Logs stay readable. May be repeated."""
        ...

    async def nodes(self) -> list[NodeFacts]:
        """The nodes there are now, with what was found on them."""
        ...

    async def read_log(self, attempt_id: str, node: str, offset: int, limit: int) -> LogChunk:
        """About `limit` bytes of whole lines from `offset`. An unknown id is an empty, complete log."""
        ...

    async def close(self) -> None:
        """Let go of our own resources. What runs, runs on."""
        ...


class SavedState(StrEnum):
    """How a checkpoint looks from outside the job."""

    COMPLETE = "complete"
    """Every file is there in its full size."""
    VERIFIED = "verified"
    """Every file has the hash it was written with."""
    DAMAGED = "damaged"
    UNFINISHED = "unfinished"
    """Never committed: being written now, or given up."""
    UNCHECKED = "unchecked"
    """Committed, and not looked into: newer ones took all that one look may cost."""


class SavedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint in a job's directory. A job can write anything there: nothing of it is proven."""

    step: int
    epoch: int
    """The attempt that saved it."""
    generation: int
    """Its group of ranks."""
    state: SavedState
    saved_at: float
    size_bytes: int
    name: str = ""
    """Its folder."""
    problem: str = ""
    world_size: int | None = None
    places: tuple[str, ...] = ("directory",)
    """Where the job says it put it: `memory`, `directory`, or an address."""


class SaveDecision(msgspec.Struct, frozen=True, kw_only=True):
    """How far the job's saves are apart, and why, as it last said itself."""

    reason: str
    """`every interval first cost`"""
    steps: int
    step_s: float
    cost_s: float | None
    written_s: float
    interval_s: float | None
    mtbf_s: float | None


class OwnSave(msgspec.Struct, frozen=True, kw_only=True):
    """A file or folder that the program put into its directory by itself. Nobody knows what is in it."""

    name: str
    """A folder's ends in `/`."""
    saved_at: float
    """0: not even that could be read."""
    size_bytes: int
    problem: str = ""
    """Why that is not all of it, as a sentence."""


class SavedCheckpoints(msgspec.Struct, frozen=True, kw_only=True):
    items: tuple[SavedCheckpoint, ...] = ()
    """The newest first."""
    decision: SaveDecision | None = None
    own: tuple[OwnSave, ...] = ()
    """The newest of them first."""
    num_own: int = 0
    """How many were seen in all."""
    is_own_cut: bool = False
    """There may be more of them: one look may cost no more."""


@runtime_checkable
class SupportsCheckpoints(Protocol):
    """An engine that can look into the checkpoint directories of jobs."""

    async def saved(self, job_id: str, verify_s: float) -> SavedCheckpoints:
        """What is in a job's directory; nothing where there is none.

        `verify_s`: read and hash for so long, the newest first; what was not reached is not `verified`.
        `LimitReached`: somebody else has hashes computed at this moment.
        """
        ...


@runtime_checkable
class SupportsCheckpointDir(Protocol):
    """An engine whose nodes have checkpoint directories elsewhere than in this machine's home."""

    to_share: str
    """What an operator types so that nodes have a directory in common."""

    def checkpoint_dir(self, job_id: str) -> str | None:
        """Where a job's is, or would be; None: nodes have no directory in common, and jobs that keep
        checkpoints are refused. Does not block.
        """
        ...


@runtime_checkable
class SupportsNotice(Protocol):
    """An engine that notices when a supervisor is gone, without being asked."""

    def notice(self, tell: Callable[[], None]) -> None:
        """Call `tell`, from any thread, when a share seems to have ended without a word: a reason to look,
        and no evidence. Only the last one given is called.
        """
        ...


@runtime_checkable
class SupportsParts(Protocol):
    """An engine whose nodes are in parts, where no attempt may have nodes of two."""

    def part_level(self, require: Mapping[str, str], pools: Collection[str]) -> str | None:
        """The label whose value all nodes have to share of a gang that requires these labels; None: any may
        be together. `pools`: those of all nodes that are known. Does not block.
        """
        ...


@runtime_checkable
class SupportsBurial(Protocol):
    """An engine that cannot see for itself that what is silent has ended."""

    async def bury(self, attempt_id: str) -> None:
        """The end of the whole attempt is recorded, though this engine still lists something of it. May be
        repeated. What is heard from is stopped; the rest is over, and holds its node no longer.
        """
        ...


@runtime_checkable
class SupportsClearing(Protocol):
    """An engine to which a person can say that nothing is left on a node."""

    def how_to_clear(self, node: str) -> str:
        """What to type, and when, as a clause; empty where it does not have the node. Does not block."""
        ...


@runtime_checkable
class SupportsOwnQueue(Protocol):
    """An engine with a queue of its own: what it is given may have to wait there for jobs of others."""

    own_queue: str
    """Whose queue that is, for people: `Slurm`."""


@runtime_checkable
class SupportsPrune(Protocol):
    """An engine that keeps things of ended attempts on a disk of ours, and can throw them away."""

    name: str

    async def prune(self, older_than: float, max_bytes: int) -> int:
        """Remove the logs of forgotten attempts last written before that date, then the oldest of the rest
        until they fit in `max_bytes`. Returns how many attempts went. Nothing that may run is touched.
        """
        ...

    async def checkpoints(self) -> list[str]:
        """The ids of the jobs that have a checkpoint directory."""
        ...

    async def drop_checkpoint(self, job_id: str) -> None:
        """Remove it. The job must have ended. May be repeated."""
        ...
