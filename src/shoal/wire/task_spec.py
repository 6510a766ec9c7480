"""What one supervisor has to do: the spec of a task, without its secrets."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class RuleAction(StrEnum):
    """What a matching log line changes about the next attempt."""

    EXCLUDE_NODE = "exclude_node"
    STOP_RETRIES = "stop_retries"


class LogRule(msgspec.Struct, frozen=True, kw_only=True):
    """Search `match` in every log line. The outcome reports the first hit of each rule."""

    match: str
    action: RuleAction


class LeftBehind(msgspec.Struct, frozen=True, kw_only=True):
    """Files of the submitted folder that did not travel with the job. The list may be incomplete."""

    folder: str = ""
    """On the submitter's machine."""
    ignored: tuple[str, ...] = ()
    """Ignored by git or by default. A folder that stayed as a whole ends with `/`."""
    excluded: tuple[str, ...] = ()
    """Excluded by the job's `exclude`."""


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """A directory of the node that the ranks see at `target`."""

    source: str
    target: str
    is_read_only: bool = False


class ProbeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to probe whether the server of a replica can take requests."""

    port: int | None = None
    """The port on which it listens. None: the supervisor assigns an unused port."""
    is_socket: bool = False
    """The server listens on a Unix socket that the supervisor names, and on no port."""
    has_own_network: bool = False
    """The server has a network namespace of its own. It is reached through a socket broker and reaches no
    other host."""
    is_public: bool = False
    """Shoal does not use the header `Authorization`: it is between the callers and the program."""
    service_path: str = ""
    """The prefix that the data plane removes from the path, as `/default/chat`."""
    path: str = "/"
    interval_s: float = 1.0
    timeout_s: float = 2.0
    failures: int = 3
    """After this many failures in a row the replica is no longer ready."""
    dead_after_s: float = 60.0
    """A replica that was ready and has not been ready for this long is ended."""
    within_s: float = 600.0
    """A replica that is not ready this long after its start is ended."""
    can_sleep: bool = False
    """The server has the paths that put it to sleep and wake it: see `runtime/replica/probe.py`."""


class GpuHandle(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of a task under each of its three names. The numbers may differ."""

    index: int
    minor: int | None = None
    """N of /dev/nvidiaN. None: unknown, so the ranks get no device file."""
    uuid: str = ""


class TaskIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Which task this is: of which job and attempt, on which node."""

    attempt_id: str
    epoch: int
    node: str
    replacement: int = 0
    """The replacement number of this task: 0, unless the task replaces a lost one in a running attempt. A
    supervisor may not run if the control plane has recorded another number for the node."""
    job_id: str
    job_number: int
    job_name: str
    project: str
    owner: str = ""
    """The user who owns the job. An engine may run the job under that user's own account."""
    array_index: int | None = None
    array_size: int | None = None


class TaskRanks(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks of the attempt: which of them this task runs, how they meet, and how they start again."""

    nodes: tuple[str, ...]
    node_rank: int
    ranks_per_node: int
    master_addr: str = "127.0.0.1"
    """The address of rank 0 that every node of the attempt can reach. The engine chooses it."""
    master_port: int = 29500
    may_split_world: bool = False
    """Whether the job allows process groups that do not span all ranks (`world: any`)."""
    max_restarts: int = 0
    """How often failed ranks may be restarted on the same nodes before the attempt ends."""
    has_standby: bool = False
    """Whether each node of several keeps a standby supervisor beside the active one."""

    @property
    def world_size(self) -> int:
        return len(self.nodes) * self.ranks_per_node


class TaskProgram(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks run, and how the supervisor reads their output and probes their server."""

    run: str
    setup: str | None = None
    env: dict[str, str] = {}
    archive_digest: str | None = None
    left_behind: LeftBehind | None = None
    log_rules: tuple[LogRule, ...] = ()
    probe: ProbeSpec | None = None
    """Set for a replica of a service: how to probe the first rank of the first node, which listens."""


class TaskResources(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks on one node may use together, and for how long.

    If a limit is None, only the machine's own limit holds.
    """

    cpus: float
    memory_bytes: int | None = None
    max_processes: int = 4096
    max_log_bytes: int = 256 << 20
    time_limit_s: float | None = None
    grace_s: float = 30.0
    require: dict[str, str] = {}
    """Labels that the job requires of its nodes. An engine may have to pass them on to its cluster."""
    gpu_ids: tuple[int, ...] = ()
    gpus: tuple[GpuHandle, ...] = ()
    """The same devices as `gpu_ids`, with the names the kernel and CUDA know them by."""
    gpu_milli: int = 1000
    """Thousandths of the task's one GPU. Below 1000 the task shares the device with others."""
    are_gpus_simulated: bool = False
    are_gpus_chosen_by_cluster: bool = False
    """The cluster that starts the task has chosen its GPUs and hides all others, so `gpus` have no minors."""

    @property
    def has_real_gpus(self) -> bool:
        return bool(self.gpu_ids) and not self.are_gpus_simulated

    @property
    def gpu_minors(self) -> tuple[int, ...]:
        """Device files of this machine that the task may open; none for simulated GPUs."""
        gpus = () if self.are_gpus_simulated else self.gpus
        return tuple(gpu.minor for gpu in gpus if gpu.minor is not None)


class TaskFolders(msgspec.Struct, frozen=True, kw_only=True):
    """Folders that the ranks see beside their work directory, and that outlive the task."""

    mounts: tuple[Mount, ...] = ()
    mount_roots: tuple[str, ...] | None = None
    """The directories that must contain the sources of mounts after links are resolved. None: no rule."""
    checkpoint_dir: str | None = None
    """The job's own directory on the node. It exists before the supervisor starts and is the same for every
    attempt."""
    checkpoint_path: str | None = None
    """Where the ranks also find it: a link in their work directory if relative, a mount if absolute."""
    checkpoint_interval_s: float | None = None
    """Seconds between saves. None: the program chooses."""
    has_shared_folder: bool = False
    """Whether all nodes of the job work in one folder, which is in `checkpoint_dir`."""
    model_dir: str | None = None
    """The checkpoint of another job that the replica serves. The ranks see it read-only."""
    cache_max_bytes: int = 0
    """The most that the project's caches may hold on each node. 0: there are no caches."""


class TaskLease(msgspec.Struct, frozen=True, kw_only=True):
    """Where the supervisor renews its lease, how often, and when it must stop without a renewal."""

    control_url: str | None = None
    """None: there is no control plane to ask, so there is no lease."""
    control_urls: tuple[str, ...] = ()
    """All control planes of the cluster. Supervisors try them in turn, because any of them may be the leader.
    Empty: `control_url` alone."""
    renew_s: float = 5.0
    fence_s: float = 1800.0


class TaskIsolation(msgspec.Struct, frozen=True, kw_only=True):
    """Which user runs the ranks, and how they are kept apart from other programs on the node."""

    uid: int | None = None
    """Run the ranks as this user. None: as the supervisor's own user."""
    confinement: tuple[str, ...] | None = None
    """Use only these confinements (`shoal nodes` prints their names). None: all that work on the node."""
    stays_in_cgroup: bool = False
    """Whether the ranks must stay in the cgroup in which the supervisor was started, or below it for
    version 1. The cluster that made the cgroup looks for a job's leftovers there and nowhere else."""
    has_open_network: bool = False
    """Programs of other projects may connect to its ports: its owner wrote `network: open`."""


class TaskSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one supervisor needs to run its task of one attempt. Holds no secret.

    Secrets and the supervisor's own credential travel beside it on a pipe, never on disk.
    """

    identity: TaskIdentity
    ranks: TaskRanks
    program: TaskProgram
    resources: TaskResources
    folders: TaskFolders
    lease: TaskLease
    isolation: TaskIsolation
