"""How the task of one node ended, as its supervisor reports it."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from shoal.wire.task_spec import RuleAction

MAX_OUTCOME_MESSAGE = 2000
MAX_EARLY_ENDS = 2
"""After this many rank groups in a row that ended within seconds, another restart in place would not help."""


class World(msgspec.Struct, frozen=True, kw_only=True):
    """The largest process group that the ranks of one node have formed."""

    size: int
    ranks: int
    """How many ranks the job has."""
    is_whole: bool
    """The group has at least as many members as the job has ranks, and its members are not all in one
    rank, or on one node of several."""


class EndKind(StrEnum):
    """How one node's task of an attempt ended, according to the process that has the evidence."""

    SUCCEEDED = "succeeded"
    """Every rank exited 0."""
    EXITED = "exited"
    """A rank exited with another code; `exit_code` and `rank` say which, first in time."""
    SIGNALED = "signaled"
    """A rank was killed by `signal`, and Shoal did not send it."""
    OUT_OF_MEMORY = "out_of_memory"
    """The memory limit was hit and the kernel killed a rank."""
    SPLIT_WORLD = "split_world"
    """Every rank exited 0, or still ran, but the process groups they formed do not span the job."""
    SETUP_FAILED = "setup_failed"
    """Unpacking, mounting or the `setup` command failed; no rank was started."""
    TIME_LIMIT = "time_limit"
    """The supervisor stopped the task at its time limit."""
    STOPPED = "stopped"
    """The supervisor was asked to stop the task and did."""
    FENCED = "fenced"
    """The supervisor could not renew its lease for `fence_s` and stopped its ranks itself."""
    LOST = "lost"
    """No outcome was written, and there is evidence that no process of the task runs any more."""


class WrittenFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Files that the ranks wrote below their work directory, which is removed with the attempt."""

    num_files: int
    num_bytes: int
    names: tuple[str, ...] = ()
    """The largest."""
    is_truncated: bool = False
    """The count stopped at its limit: there are more files."""
    folder: str = ""
    """The one folder that holds all of them and nothing else. Empty: there is no such folder."""


class TaskOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one node's task. The supervisor writes it durably before it exits."""

    attempt_id: str
    epoch: int
    node: str
    kind: EndKind
    ended_at: float
    exit_code: int | None = None
    signal: int | None = None
    rank: int | None = None
    """The first rank that failed, in the attempt's numbering."""
    failed_at: float | None = None
    """When that rank failed. The others may stop later."""
    message: str = ""
    is_hang: bool = False
    """The rank made no progress, and the hang detector killed it."""
    rules_hit: tuple[RuleAction, ...] = ()
    started_at: float | None = None
    """When the ranks were started; None if they never were."""
    cpu_s: float | None = None
    """CPU seconds used by the whole tree, where the kernel counts them."""
    restarts: int = 0
    """How often the ranks were restarted in place."""
    written_files: WrittenFiles | None = None
    """Files that are lost with the attempt. Set when the attempt has ended for good."""
    replacement: int = 0
    """The replacement number of the task: see `TaskSpec`."""
    world: World | None = None
    """The largest process group that the ranks formed. None: they reported none."""
    is_external_stop: bool = False
    """A signal from the cluster, or from a person on the node, stopped it before Shoal asked for that."""
    gives_up: bool = False
    """The program ended by itself soon after its start, so a restart in place would waste a retry."""
    num_early: int = 0
    """How many rank groups in a row, including this one, ended within seconds of their start."""
