"""What the control plane and a supervisor say to each other.

A leaf: workers install it without the control plane, so it imports nothing of ours and no pydantic.
Unknown fields are ignored on both sides, so that either may be upgraded first.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from shoal.samples import Samples

MAX_OUTCOME_MESSAGE = 2000
MAX_EARLY = 2
"""After so many groups of ranks in a row that were killed within seconds, another in place would not help."""


class RuleAction(StrEnum):
    """What a matching log line means for what comes after this attempt."""

    EXCLUDE_NODE = "exclude_node"
    STOP_RETRIES = "stop_retries"


class LogRule(msgspec.Struct, frozen=True, kw_only=True):
    """`match` is searched in every log line; the first hit of each rule is reported in the outcome."""

    match: str
    action: RuleAction


class LeftBehind(msgspec.Struct, frozen=True, kw_only=True):
    """Files of the folder that a job was submitted from which did not travel with it; not always all."""

    folder: str = ""
    """On the submitter's machine."""
    ignored: tuple[str, ...] = ()
    """By git, or because nobody ever wants them; a folder that stayed as a whole ends with `/`."""
    excluded: tuple[str, ...] = ()
    """By the job's `exclude`."""


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """A directory of the node, seen by the ranks at `target`."""

    source: str
    target: str
    is_read_only: bool = False


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks on one node may use together. None: no limit but the machine's."""

    cpus: float
    memory_bytes: int | None = None
    max_processes: int = 4096
    max_log_bytes: int = 256 << 20


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """How to find out whether a server that runs as a replica of a service can be given requests."""

    port: int | None = None
    """Where it listens; None: the supervisor gives it a port that nobody else has."""
    is_socket: bool = False
    """It listens on a Unix socket that the supervisor names, and on no port."""
    has_own_network: bool = False
    """Its ports are in a network of its own, which is reached through a door and reaches nobody."""
    is_public: bool = False
    """`Authorization` is between its callers and the program: nothing of ours stands there."""
    service_path: str = ""
    """The part of the path in front of what the program sees, as `/default/chat`."""
    path: str = "/"
    interval_s: float = 1.0
    timeout_s: float = 2.0
    failures: int = 3
    """In a row, and it is not ready any more."""
    dead_after_s: float = 60.0
    """One that was ready and is not for so long is ended."""
    within_s: float = 600.0
    """So is one that was not ready so long after its start."""
    can_sleep: bool = False
    """The server has the paths that put it to sleep and wake it: see `runtime/sleeping.py`."""


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """What a supervisor knows of the replica it runs. Said with every message."""

    address: str
    """`10.0.0.7:8000`, as every node can reach it; `unix:/PATH` or `door:/PATH` on this one; `tls:HOST:PORT`,
    where a porch stands before it."""
    is_ready: bool = False
    at: float = 0.0
    """Since when it is, or is not."""
    because: str = ""
    """How the last question was not answered, while it is not ready."""
    is_asleep: bool = False
    """It was told to sleep and does: it is well, and cannot be given requests."""


class GpuHandle(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of a share, by each of its three names; they need not agree."""

    index: int
    minor: int | None = None
    """N of /dev/nvidiaN. None: nobody knows, and no device file is handed over."""
    uuid: str = ""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one supervisor needs to run its share of one attempt. Holds no secret.

    Secrets and the supervisor's own credential travel beside it on a pipe, never on disk.
    """

    attempt_id: str
    epoch: int
    job_id: str
    job_number: int
    job_name: str
    project: str
    owner: str = ""
    """The name of the user whose job it is: an engine may run it under that user's own account."""
    node: str
    node_rank: int
    nodes: tuple[str, ...]
    ranks_per_node: int
    gpu_ids: tuple[int, ...] = ()
    gpus: tuple[GpuHandle, ...] = ()
    """The same devices as `gpu_ids`, with the names the kernel and CUDA know them by."""
    gpu_milli: int = 1000
    """Thousandths of its one GPU that are its own; below 1000 others use the device beside it."""
    are_gpus_simulated: bool = False
    are_gpus_chosen_there: bool = False
    """The cluster that starts the share chose them, and keeps it from all others: `gpus` know no minors."""
    run: str
    setup: str | None = None
    env: dict[str, str] = {}
    mounts: tuple[Mount, ...] = ()
    mount_roots: tuple[str, ...] | None = None
    """Where the sources of mounts must really lie, links followed; None: nobody has said."""
    archive_digest: str | None = None
    left_behind: LeftBehind | None = None
    limits: Limits
    require: dict[str, str] = {}
    """Labels that the job asked its nodes to have: a cluster below may have to be asked for these, too."""
    log_rules: tuple[LogRule, ...] = ()
    time_limit_s: float | None = None
    grace_s: float = 30.0
    fence_s: float = 1800.0
    renew_s: float = 5.0
    control_url: str | None = None
    control_urls: tuple[str, ...] = ()
    """All control planes of the cluster, tried in turn: any of them may be the one that leads. Empty:
    `control_url` alone."""
    array_index: int | None = None
    array_size: int | None = None
    uid: int | None = None
    """Run the ranks as this user; None: as whoever runs the supervisor."""
    master_addr: str = "127.0.0.1"
    """Where rank 0 listens, as every node of the attempt can reach it; chosen by the engine."""
    master_port: int = 29500
    incarnation: int = 0
    """The group of ranks that this share was begun for: 0, unless it replaces a lost one in a running
    attempt. Who carries another one than the control plane has recorded for the node may not run."""
    max_restarts: int = 0
    """How often ranks that failed may be started anew on the same nodes, before the attempt is over."""
    has_standby: bool = False
    """Whether each node of several keeps a supervisor in waiting beside the one that works."""
    checkpoint_dir: str | None = None
    """The job's own directory on the node, there before the supervisor is and the same for every attempt."""
    checkpoint_path: str | None = None
    """Where the ranks also find it: relative, a link in their work directory; absolute, a mount."""
    checkpoint_interval_s: float | None = None
    """How often to save; None: as the program finds best."""
    has_shared_folder: bool = False
    """Whether all its nodes work in one folder, which is in `checkpoint_dir`."""
    cache_max_bytes: int = 0
    """How much its project's caches may hold on each node; 0: there are none."""
    model_dir: str | None = None
    """The checkpoint of another job that a replica serves, read-only."""
    has_open_network: bool = False
    """Programs of other projects may connect to its ports: its owner wrote `network: open`."""
    may_split_world: bool = False
    """Whether process groups that do not span all ranks are what the job wants."""
    probe: Probe | None = None
    """It is a replica of a service: the first rank of the first node listens, and is asked so."""
    confinement: tuple[str, ...] | None = None
    """Use only these of the ways to confine (`shoal nodes` prints their names); None: all that work here."""
    stays_in_cgroup: bool = False
    """Whether its ranks must be in the cgroup that its supervisor was started in, or below where that is of
    version 1: the cluster which made it looks there for what a job has left, and nowhere else."""

    @property
    def world_size(self) -> int:
        return len(self.nodes) * self.ranks_per_node

    @property
    def gpu_minors(self) -> tuple[int, ...]:
        """Device files of this machine the share may open; none for simulated GPUs."""
        given = () if self.are_gpus_simulated else self.gpus
        return tuple(gpu.minor for gpu in given if gpu.minor is not None)


class World(msgspec.Struct, frozen=True, kw_only=True):
    """The largest process group that the ranks of one node have formed."""

    size: int
    ranks: int
    """How many ranks the job has."""
    is_whole: bool
    """It has at least as many members, and not all of them are one rank's own, or on one node of several."""


class EndKind(StrEnum):
    """How one node's share of an attempt ended, as seen by whoever has evidence."""

    SUCCEEDED = "succeeded"
    """Every rank exited 0."""
    EXITED = "exited"
    """A rank exited with another code; `exit_code` and `rank` say which, first in time."""
    SIGNALED = "signaled"
    """A rank was killed by `signal`, not by us."""
    OUT_OF_MEMORY = "out_of_memory"
    """The memory limit was hit and the kernel killed a rank."""
    SPLIT_WORLD = "split_world"
    """Every rank exited 0, or still ran, but the process groups they formed do not span the job."""
    SETUP_FAILED = "setup_failed"
    """Unpacking, mounting or the `setup` command failed; no rank was started."""
    TIME_LIMIT = "time_limit"
    """Our own time limit stopped it."""
    STOPPED = "stopped"
    """We were asked to stop it and did."""
    FENCED = "fenced"
    """The supervisor could not renew its lease for `fence_s` and stopped its ranks itself."""
    LOST = "lost"
    """No outcome was written, and there is evidence that nothing of it runs any more."""


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """Files that the ranks wrote below their work directory, which is removed with the attempt."""

    num_files: int
    num_bytes: int
    names: tuple[str, ...] = ()
    """The largest."""
    is_more: bool = False
    """Not all of it was looked at."""
    folder: str = ""
    """The one folder that all of them are in, if nothing else is there; empty: there is none such."""


class NodeOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one node's share: written durably by the supervisor before it exits."""

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
    """When that was: the others may take their time to stop."""
    message: str = ""
    is_hang: bool = False
    """That rank did not move, and was killed for it."""
    rules_hit: tuple[RuleAction, ...] = ()
    started_at: float | None = None
    """When the ranks were started; None if they never were."""
    cpu_s: float | None = None
    """CPU seconds used by the whole tree, where the kernel counts them."""
    restarts: int = 0
    """How often the ranks were started anew in place."""
    written: Written | None = None
    """Of what ended for good: what is lost with it."""
    incarnation: int = 0
    """Of the share that ended: see `Order`."""
    world: World | None = None
    """The largest process group that its ranks formed; None: they told of none."""
    is_unasked: bool = False
    """It was stopped by a signal, of the cluster's or of somebody's on the node, before we asked for that."""
    gives_up: bool = False
    """The program ended by itself soon after its start: starting it again in place would burn a retry."""
    num_early: int = 0
    """How many groups of ranks in a row, this one included, ended within seconds of their start."""


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """How one node came from a failure to its next step. Seconds count from when it was noticed there."""

    generation: int
    """The group that followed."""
    node: str
    failed_at: float
    kept: int
    """Ranks that lived on."""
    spares: int
    """Ranks that a waiting process became; the rest were started."""
    formed_s: float
    """Until every rank of the node was told or started."""
    joined_s: float | None = None
    """Until all of them had met; None: the program does not say."""
    stepped_s: float | None = None
    """Until all of them had made a step."""
    steps_lost: int | None = None
    """Complete steps that were done again."""
    first_step: int | None = None
    """How many steps were complete after the first one it made."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the ranks of one node are, as a program that uses `shoal.runtime` says it."""

    generation: int
    step: int
    """Complete steps."""
    at: float
    """When that was so."""
    step_s: float | None = None
    """How long a step of this group took lately."""


class Signs(msgspec.Struct, frozen=True, kw_only=True):
    """What the newest group of ranks shows of itself on one node, whatever program it runs.

    Times are of the node's wall clock.
    """

    generation: int
    started_at: float
    """When the processes of its ranks were started."""
    printed_at: float | None = None
    """When the first of them wrote a line."""
    worked_at: float | None = None
    """When it was first seen that they had used a processor."""

    @property
    def ran_at(self) -> float:
        """When they ran again, by the best of these signs."""
        return self.printed_at or self.worked_at or self.started_at


class DrillAct(StrEnum):
    """What a drill has one supervisor do."""

    KILL_RANK = "kill_rank"
    KILL_RANKS = "kill_ranks"
    """Every rank of the node."""
    KILL_NODE = "kill_node"
    """The ranks and the supervisor itself: what is left when a machine is lost."""
    HANG_RANK = "hang_rank"
    """Stopped, and continued after `for_s` if nobody has ended it by then."""
    CUT_OFF = "cut_off"
    """The supervisor says nothing to the control plane and hears nothing from it for `for_s`."""
    CORRUPT = "corrupt"
    """The ranks are stopped, so that they save no more, and bytes of the newest checkpoint are changed."""


class DrillOrder(msgspec.Struct, frozen=True, kw_only=True):
    """May be heard often; done once."""

    drill_id: str
    act: DrillAct
    rank: int | None = None
    for_s: float = 0.0
    generation: int | None = None
    """The group of ranks that it is meant for: no other is harmed. None: nobody has said."""


class Drilled(msgspec.Struct, frozen=True, kw_only=True):
    """What a supervisor did for a drill. Said with every message from then on."""

    drill_id: str
    act: DrillAct
    at: float
    step: int | None = None
    """Complete steps at that moment; None: the program does not say."""
    step_s: float | None = None
    refusal: str = ""
    """Why it was not done."""
    told: str = ""


class Phase(StrEnum):
    """Where a living supervisor is."""

    PREPARING = "preparing"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


class Renewal(msgspec.Struct, frozen=True, kw_only=True):
    """A supervisor's heartbeat: `I am alive, this is where I am`. May be repeated or lost."""

    attempt_id: str
    epoch: int
    node: str
    incarnation: int = 0
    phase: Phase
    started_at: float | None = None
    outcome: NodeOutcome | None = None
    """Set once, with phase `ended`; the control plane's answer means it is safely recorded."""
    saved_s: float | None = None
    """How long ago the job last saved its work, as seen on this node; None: nobody has seen it."""
    generation: int = 0
    """Which group of ranks runs here."""
    master_port: int | None = None
    """Where that group meets, as far as this node knows; the first node alone decides it."""
    failure: NodeOutcome | None = None
    """How this group ended here: may another follow in the same place? From the only node of an attempt, how
    the one before ended: it does not ask."""
    recovery: Recovery | None = None
    """The newest one here."""
    metrics: tuple[Samples, ...] = ()
    """Told again until an answer comes: the same points twice change nothing."""
    progress: Progress | None = None
    signs: Signs | None = None
    world: World | None = None
    """The largest process group that the ranks which run now have formed, as far as they told."""
    drilled: Drilled | None = None
    """The newest one here."""
    serving: Serving | None = None
    """Of a replica, once its server was started."""
    wait_s: float = 0.0
    """How long the answer may wait for something new to say."""
    nonce: str = ""
    """New in every message: an answer to another message proves nothing about this one."""
    proof_version: int = 1
    """Up to which version the asker knows what a proof is made of (see `shoal.proof`)."""


class RenewalAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`should_stop` is an order: stop the ranks within `grace_s`, then report.

    Without a valid `proof` (see `shoal.proof`) it is nobody's answer and counts for nothing.
    """

    should_stop: bool = False
    grace_s: float = 30.0
    because: str = ""
    is_stale: bool = False
    """This attempt is not, or no longer, the one that may run: stop at once, whatever the grace."""
    generation: int = 0
    """The group of ranks there should be: a supervisor with an older one clears it and starts this."""
    master_port: int | None = None
    """Where that group meets; None: its first node has not said yet."""
    is_after_hang: bool = False
    """The group before is ended for a hang: who has ranks of it keeps their stacks."""
    drill: DrillOrder | None = None
    should_sleep: bool | None = None
    """Whether the server of a replica should sleep; None: as it does."""
    control_urls: tuple[str, ...] = ()
    """All control planes known now, this one first: where to ask when it does not answer any more."""
    proof: str = ""


class Papers(msgspec.Struct, frozen=True, kw_only=True):
    """By which one end of a porch proves itself: a certificate with its key, and the authority that the other
    end must be certified by. All PEM.
    """

    certificate: str
    key: str
    authority: str


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """What travels on the supervisor's standard input instead of on disk."""

    replica_secret: str = ""
    """What a data plane sends with every request for this replica; the program has it as
    SHOAL_REPLICA_KEY."""
    proof_key: str = ""
    """Signs what the supervisor says, and tells the control plane's answers from others; never sent."""
    job_token: str | None = None
    secrets: dict[str, str] = {}
    porch: Papers | None = None
    """Data planes are on other machines: the replica is reached through a porch, which shows these."""


KEEPER_PATIENCE_S = 300.0
KEEPER_PING_S = 5.0
"""How often a keeper says something, at the least."""
KEEPER_ASK_S = 4.0
"""For how long one control plane may keep a keeper from asking the next: to connect, and to answer where no
piece of a log is on its way. How long one that lives may be quiet follows from both."""

KEEPER_WAIT_S = 20.0
"""For how long a keeper waits for the answer to one question for its order, or about a piece of its log. Who
answers later answers nobody, and has to be asked again."""


class Summons(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine hands a supervisor on another machine, on its standard input: where its order is, and
    the right to fetch it once. A secret while nobody has.
    """

    attempt_id: str
    urls: tuple[str, ...]
    """Of the control planes, tried in turn: any of them may be the one that leads."""
    ca: str
    """The certificate of the cluster's own authority (PEM): whoever cannot show one of its is nobody."""
    ticket: str
    incarnation: int = 0
    spool: str = ""
    """A directory on the node's own disk, this user's or, as /tmp is, for all; empty: /tmp."""
    devices_from: str = ""
    """The variable in which the cluster says which devices it gave; empty: those of the order."""
    patience_s: float = KEEPER_PATIENCE_S
    """How long to try to get the order."""
    time_limit_s: float | None = None
    """What an order with a time limit has at most, counted from when its keeper began: the cluster ends all
    of it soon after. None: as long as the order says."""
    can_follow: bool = False
    """Whether a keeper whose supervisor was lost may take the order for the share in its place: the cluster
    has given it room on the node, which another would have to wait for."""
    process: str = ""
    """The name of the process that gets this, where who starts it has to know it again; empty: it makes its
    own."""


ProcessName = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
"""Random, made by the process itself or by who starts it. Looked at when it is read from somebody."""


class Fetch(msgspec.Struct, frozen=True, kw_only=True):
    """A supervisor asks for its order. Repeated by the same process it is one; another process gets none."""

    attempt_id: str
    node: str
    incarnation: int = 0
    """The one that the asker was started for."""
    process: ProcessName
    """Of the one that asks."""
    after: int | None = None
    """The incarnation that a keeper which is still there had before: it asks for whichever follows."""


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """The order of one share with what must not be on disk. Given to one process, once."""

    order: Order
    credentials: Credentials
    has_archive: bool = False


class Dispatch(msgspec.Struct, frozen=True, kw_only=True):
    """What the keeper of a share tells the desk; bytes of the share's log follow. May be repeated."""

    attempt_id: str
    epoch: int
    node: str
    incarnation: int = 0
    process: ProcessName
    """The one that fetched the order."""
    offset: int = 0
    """Where in the share's log the bytes that follow begin."""
    started_at: float | None = None
    outcome: NodeOutcome | None = None
    """Sent once the desk has the whole log."""
    left: str = ""
    """The supervisor is dead, and what it left does not die: how that looks, in words."""
    will_follow: bool = False
    """With an outcome: this keeper asks for the order of the share in place of the lost one."""


class DispatchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    size: int = 0
    """How many bytes of the share's log the desk has: what to send next begins there."""
    stop_grace_s: float | None = None
    """Set when the share is to end."""
    is_recorded: bool = False
    """The outcome is on the control plane's disk: nobody needs the share's files any more."""
    control_urls: tuple[str, ...] = ()
    """All control planes known now, as in `RenewalAnswer`: here the TLS of who answers vouches for them."""
