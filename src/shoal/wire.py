"""The messages between the control plane, node agents and supervisors.

Workers install this module without the control plane, so it imports nothing else of Shoal but `curve`, and no
pydantic. Both sides ignore unknown fields, so either side may be upgraded first.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from shoal.curve import Samples

MAX_OUTCOME_MESSAGE = 2000
MAX_EARLY_ENDS = 2
"""After this many rank groups in a row that ended within seconds, another restart in place would not help."""


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


class TaskLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks on one node may use together. None: only the machine's own limit holds."""

    cpus: float
    memory_bytes: int | None = None
    max_processes: int = 4096
    max_log_bytes: int = 256 << 20


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


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The supervisor's view of the replica that it runs. Every message carries it."""

    address: str
    """`10.0.0.7:8000` if every node can reach it, `unix:/PATH` or `broker:/PATH` on this node only,
    `tls:HOST:PORT` behind a sidecar."""
    is_ready: bool = False
    at: float = 0.0
    """When `is_ready` last changed."""
    because: str = ""
    """Why the last probe failed. Empty while the replica is ready."""
    is_asleep: bool = False
    """The server sleeps because it was told to. It is healthy and cannot take requests."""


class GpuHandle(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of a task under each of its three names. The numbers may differ."""

    index: int
    minor: int | None = None
    """N of /dev/nvidiaN. None: unknown, so the ranks get no device file."""
    uuid: str = ""


class TaskSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one supervisor needs to run its task of one attempt. Holds no secret.

    Secrets and the supervisor's own credential travel beside it on a pipe, never on disk.
    """

    attempt_id: str
    epoch: int
    job_id: str
    job_number: int
    job_name: str
    project: str
    owner: str = ""
    """The user who owns the job. An engine may run the job under that user's own account."""
    node: str
    node_rank: int
    nodes: tuple[str, ...]
    ranks_per_node: int
    gpu_ids: tuple[int, ...] = ()
    gpus: tuple[GpuHandle, ...] = ()
    """The same devices as `gpu_ids`, with the names the kernel and CUDA know them by."""
    gpu_milli: int = 1000
    """Thousandths of the task's one GPU. Below 1000 the task shares the device with others."""
    are_gpus_simulated: bool = False
    are_gpus_chosen_by_cluster: bool = False
    """The cluster that starts the task has chosen its GPUs and hides all others, so `gpus` have no minors."""
    run: str
    setup: str | None = None
    env: dict[str, str] = {}
    mounts: tuple[Mount, ...] = ()
    mount_roots: tuple[str, ...] | None = None
    """The directories that must contain the sources of mounts after links are resolved. None: no rule."""
    archive_digest: str | None = None
    left_behind: LeftBehind | None = None
    limits: TaskLimits
    require: dict[str, str] = {}
    """Labels that the job requires of its nodes. An engine may have to pass them on to its cluster."""
    log_rules: tuple[LogRule, ...] = ()
    time_limit_s: float | None = None
    grace_s: float = 30.0
    fence_s: float = 1800.0
    renew_s: float = 5.0
    control_url: str | None = None
    control_urls: tuple[str, ...] = ()
    """All control planes of the cluster. Supervisors try them in turn, because any of them may be the leader.
    Empty: `control_url` alone."""
    array_index: int | None = None
    array_size: int | None = None
    uid: int | None = None
    """Run the ranks as this user. None: as the supervisor's own user."""
    master_addr: str = "127.0.0.1"
    """The address of rank 0 that every node of the attempt can reach. The engine chooses it."""
    master_port: int = 29500
    replacement: int = 0
    """The replacement number of this task: 0, unless the task replaces a lost one in a running attempt. A
    supervisor may not run if the control plane has recorded another number for the node."""
    max_restarts: int = 0
    """How often failed ranks may be restarted on the same nodes before the attempt ends."""
    has_standby: bool = False
    """Whether each node of several keeps a standby supervisor beside the active one."""
    checkpoint_dir: str | None = None
    """The job's own directory on the node. It exists before the supervisor starts and is the same for every
    attempt."""
    checkpoint_path: str | None = None
    """Where the ranks also find it: a link in their work directory if relative, a mount if absolute."""
    checkpoint_interval_s: float | None = None
    """Seconds between saves. None: the program chooses."""
    has_shared_folder: bool = False
    """Whether all nodes of the job work in one folder, which is in `checkpoint_dir`."""
    cache_max_bytes: int = 0
    """The most that the project's caches may hold on each node. 0: there are no caches."""
    model_dir: str | None = None
    """The checkpoint of another job that the replica serves. The ranks see it read-only."""
    has_open_network: bool = False
    """Programs of other projects may connect to its ports: its owner wrote `network: open`."""
    may_split_world: bool = False
    """Whether the job allows process groups that do not span all ranks (`world: any`)."""
    probe: ProbeSpec | None = None
    """Set for a replica of a service: how to probe the first rank of the first node, which listens."""
    confinement: tuple[str, ...] | None = None
    """Use only these confinements (`shoal nodes` prints their names). None: all that work on the node."""
    stays_in_cgroup: bool = False
    """Whether the ranks must stay in the cgroup in which the supervisor was started, or below it for
    version 1. The cluster that made the cgroup looks for a job's leftovers there and nowhere else."""

    @property
    def world_size(self) -> int:
        return len(self.nodes) * self.ranks_per_node

    @property
    def gpu_minors(self) -> tuple[int, ...]:
        """Device files of this machine that the task may open; none for simulated GPUs."""
        gpus = () if self.are_gpus_simulated else self.gpus
        return tuple(gpu.minor for gpu in gpus if gpu.minor is not None)


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


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """How one node got from a failure to its next step. Seconds count from when it noticed the failure."""

    rendezvous_round: int
    """The round that followed the failure."""
    node: str
    failed_at: float
    surviving_ranks: int
    """Ranks that survived."""
    spare_ranks: int
    """Ranks that a spare process became. The others were started."""
    formed_s: float
    """Until every rank of the node had its assignment or was started."""
    joined_s: float | None = None
    """Until all of them had joined the group. None: the program does not report it."""
    stepped_s: float | None = None
    """Until all of them had made a step."""
    steps_lost: int | None = None
    """Complete steps that were repeated."""
    first_step: int | None = None
    """How many steps were complete after the first step of the new round."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the ranks of one node are, as a program that uses `shoal.runtime` reports it."""

    rendezvous_round: int
    step: int
    """Complete steps."""
    at: float
    """When the ranks had completed that step."""
    step_s: float | None = None
    """How long a recent step of this round took."""


class ActivitySigns(msgspec.Struct, frozen=True, kw_only=True):
    """Signs of activity of the newest rank group on one node, for any program.

    Times are of the node's wall clock.
    """

    rendezvous_round: int
    started_at: float
    """When the processes of the ranks were started."""
    printed_at: float | None = None
    """When the first of them wrote a line."""
    worked_at: float | None = None
    """When the supervisor first saw that they had used a processor."""

    @property
    def ran_at(self) -> float:
        """When the ranks ran again, according to the best of these signs."""
        return self.printed_at or self.worked_at or self.started_at


class DrillAct(StrEnum):
    """What a drill makes one supervisor do."""

    KILL_RANK = "kill_rank"
    KILL_RANKS = "kill_ranks"
    """Every rank of the node."""
    KILL_NODE = "kill_node"
    """The ranks and the supervisor itself, as if the machine were lost."""
    HANG_RANK = "hang_rank"
    """The rank is stopped, and continued after `for_s` if it has not been ended by then."""
    CUT_OFF = "cut_off"
    """The supervisor sends nothing to the control plane and receives nothing from it for `for_s`."""
    CORRUPT = "corrupt"
    """The ranks are stopped, so that they save no more, and bytes of the newest checkpoint are altered."""


class DrillCommand(msgspec.Struct, frozen=True, kw_only=True):
    """An order to run a drill. The supervisor may receive it often and runs it once."""

    drill_id: str
    act: DrillAct
    rank: int | None = None
    for_s: float = 0.0
    rendezvous_round: int | None = None
    """The round that the drill is meant for. No other round is harmed. None: unspecified."""


class DrillResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a supervisor did for a drill. Every later message carries it."""

    drill_id: str
    act: DrillAct
    at: float
    step: int | None = None
    """Complete steps at that moment. None: the program does not report them."""
    step_s: float | None = None
    refusal: str = ""
    """Why the supervisor did not run the drill."""
    detail: str = ""


class TaskPhase(StrEnum):
    """The phase of a task whose supervisor is alive."""

    PREPARING = "preparing"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


class Renewal(msgspec.Struct, frozen=True, kw_only=True):
    """A supervisor's heartbeat: it is alive, and this is its state. A renewal may be repeated or lost."""

    attempt_id: str
    epoch: int
    node: str
    replacement: int = 0
    phase: TaskPhase
    started_at: float | None = None
    outcome: TaskOutcome | None = None
    """Set once, with phase `ended`. The control plane's reply means that the outcome is safely recorded."""
    saved_s: float | None = None
    """How long ago the job last saved its work, as seen on this node. None: no save was seen."""
    rendezvous_round: int = 0
    """The round of the ranks that run here."""
    master_port: int | None = None
    """The rendezvous port of that round, if this node knows it. Only the first node decides it."""
    failure: TaskOutcome | None = None
    """How this rank group ended on this node. With it the supervisor asks whether another may follow in
    place. The only node of an attempt does not ask: there it is how the group before ended."""
    recovery: Recovery | None = None
    """The newest recovery on this node."""
    metrics: tuple[Samples, ...] = ()
    """Repeated until a reply comes. The same points twice change nothing."""
    progress: Progress | None = None
    signs: ActivitySigns | None = None
    world: World | None = None
    """The largest process group that the current ranks have reported."""
    drill_result: DrillResult | None = None
    """The newest drill on this node."""
    replica_status: ReplicaStatus | None = None
    """Set for a replica once its server was started."""
    wait_s: float = 0.0
    """How long the control plane may hold the reply until it has news."""
    nonce: str = ""
    """New in every message, so that a reply to another message proves nothing about this one."""
    proof_version: int = 1
    """The newest version of the proof that the supervisor knows (see `shoal.proof`)."""


class RenewalReply(msgspec.Struct, frozen=True, kw_only=True):
    """The control plane's reply to a renewal. `should_stop`: stop the ranks within `grace_s`, then report.

    A reply without a valid `proof` (see `shoal.proof`) is ignored.
    """

    should_stop: bool = False
    grace_s: float = 30.0
    because: str = ""
    is_stale: bool = False
    """This attempt may not run, or may no longer run: stop at once, whatever the grace."""
    rendezvous_round: int = 0
    """The round that should run. A supervisor with an older round ends its ranks and starts this one."""
    master_port: int | None = None
    """The rendezvous port of that round. None: the first node has not reported it yet."""
    is_after_hang: bool = False
    """The round before is ended for a hang. A node that has ranks of it saves their stacks."""
    drill: DrillCommand | None = None
    should_sleep: bool | None = None
    """Whether the server of a replica should sleep. None: no change."""
    control_urls: tuple[str, ...] = ()
    """All control planes known now, this one first. The supervisor asks the others when this one is
    silent."""
    proof: str = ""


class TlsIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The TLS identity of one end of a sidecar connection: a certificate, its key, and the authority that
    must have certified the other end. All PEM.
    """

    certificate: str
    key: str
    authority: str


class TaskCredentials(msgspec.Struct, frozen=True, kw_only=True):
    """The secrets of a task. They travel on the supervisor's standard input and are never on disk."""

    replica_secret: str = ""
    """Sent by data planes with every request for this replica. The program has it as SHOAL_REPLICA_KEY."""
    proof_key: str = ""
    """Signs the supervisor's messages and verifies the control plane's replies. The key itself is never
    sent."""
    job_token: str | None = None
    secrets: dict[str, str] = {}
    sidecar: TlsIdentity | None = None
    """Set where data planes are on other machines: the replica's sidecar shows this identity."""


AGENT_PATIENCE_S = 300.0
AGENT_PING_S = 5.0
"""A node agent sends a message at least this often."""
AGENT_CONTACT_S = 4.0
"""How long a node agent waits for one control plane before it asks the next: to connect, and to answer where
no piece of a log is in transit. How long a living node agent may be quiet follows from both numbers."""

AGENT_REPLY_S = 20.0
"""How long a node agent waits for the reply to one request for its task spec, or to one piece of its log. A
later reply is lost, and the node agent has to ask again."""


class LaunchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine hands a node agent on its standard input: where the task spec is, and the right to fetch
    it once. It is a secret until a process has fetched the spec.
    """

    attempt_id: str
    urls: tuple[str, ...]
    """The control planes, tried in turn, because any of them may be the leader."""
    ca: str
    """The certificate of the cluster's own authority (PEM). A server must show a certificate by it."""
    bootstrap_token: str
    replacement: int = 0
    spool: str = ""
    """A directory on the node's own disk that belongs to this user or, like /tmp, to all. Empty: /tmp."""
    devices_variable: str = ""
    """The variable in which the cluster names the devices that it gave. Empty: those of the task spec."""
    patience_s: float = AGENT_PATIENCE_S
    """How long to try to get the task spec."""
    time_limit_s: float | None = None
    """The most that a task spec with a time limit gets, counted from the start of its node agent. The cluster
    ends all of the task soon after. None: the time limit of the task spec holds."""
    can_replace: bool = False
    """Whether a node agent whose supervisor was lost may fetch the spec of the task that replaces it. The
    agent already has room on the node, for which another would have to wait."""
    process: str = ""
    """The name of the process that gets this request, if the engine must recognize the process later. Empty:
    the process makes its own name."""


ProcessName = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
"""A random name that the process itself, or the engine that starts it, makes. Checked when it is received."""


class TaskSpecRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A node agent's request for its task spec. The same process may repeat it; another process gets none."""

    attempt_id: str
    node: str
    replacement: int = 0
    """The replacement number that the process was started for."""
    process: ProcessName
    """The name of the requesting process."""
    previous_replacement: int | None = None
    """The replacement number of the lost task, from a node agent that is still alive and asks for the
    next."""


class TaskAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """The spec of one task with its secrets. It is given to one process, once."""

    task_spec: TaskSpec
    credentials: TaskCredentials
    has_archive: bool = False


class StatusReport(msgspec.Struct, frozen=True, kw_only=True):
    """A node agent's report about its task. Bytes of the task's log follow it. May be repeated."""

    attempt_id: str
    epoch: int
    node: str
    replacement: int = 0
    process: ProcessName
    """The process that fetched the task spec."""
    offset: int = 0
    """The offset in the task's log at which the bytes that follow begin."""
    started_at: float | None = None
    outcome: TaskOutcome | None = None
    """Sent once the control plane has the whole log."""
    leftovers: str = ""
    """A description of processes that do not die although the supervisor is dead. Empty: there are none."""
    will_replace: bool = False
    """Set with an outcome: this node agent asks for the spec of the task that replaces the lost one."""


class StatusReply(msgspec.Struct, frozen=True, kw_only=True):
    size: int = 0
    """How many bytes of the task's log the control plane has. The next piece begins there."""
    stop_grace_s: float | None = None
    """Set when the task has to end."""
    is_recorded: bool = False
    """The outcome is on the control plane's disk, so the task's files are no longer needed."""
    control_urls: tuple[str, ...] = ()
    """All control planes known now, as in `RenewalReply`. Here the server's TLS certificate vouches for
    them."""
