"""The API's replies: plain dictionaries of a declared shape, documented, and encoded as they are."""

from __future__ import annotations

from typing import Any, NotRequired

from typing_extensions import TypedDict


class GpuRequestView(TypedDict):
    count: int
    kind: str | None
    share: float


class TopologyView(TypedDict):
    within: str | None
    is_required: bool
    spread: str | None


class RequestView(TypedDict):
    """Per node, except `min_nodes` and `max_nodes`."""

    nodes: int
    min_nodes: int
    max_nodes: int
    cpus: float
    memory_bytes: int | None
    disk_bytes: int
    gpus: GpuRequestView | None
    ranks_per_node: int
    is_exclusive: bool
    exclude: list[str]
    require: dict[str, str]
    topology: TopologyView | None
    time_limit_s: float | None


class ArrayView(TypedDict):
    id: str
    index: int
    size: int


class ChangeView(TypedDict):
    """`setting`, such as `nodes: 2`, would have started the job when asked, or about at `starts_at`."""

    setting: str
    sentence: str
    starts_at: float | None


class ReplicaRefView(TypedDict):
    """The job is a replica of a service."""

    service_id: str
    service: str
    release: int
    slot: int


class OutlookView(TypedDict):
    """When a waiting job starts. `basis` is `scenarios`, `promise` or `nothing`; a time is null if it cannot
    be predicted. The start is between `earliest` and `latest` with the probability `coverage`, which rests on
    the last `num_starts` predicted starts; below 40 it is a guess. `promised_at` rests on the time limits of
    running jobs. It `is_firm` when no waiting job can go first. `not_looked`: changes that were not tried.
    """

    basis: str
    earliest: float | None
    likely: float | None
    latest: float | None
    coverage: float | None
    num_starts: int | None
    promised_at: float | None
    is_firm: bool
    sentence: str
    changes: list[ChangeView]
    not_looked: str | None


class JobView(TypedDict):
    """`status` is `queued starting running stopping` while open, then `succeeded failed cancelled`."""

    job_id: str
    ref: str
    project: str
    number: int
    name: str
    owner: str
    queue: str
    priority: int
    status: str
    epoch: int
    nodes: list[str]
    array: ArrayView | None
    replica: ReplicaRefView | None
    submitted_at: float
    deadline_at: float | None
    started_at: float | None
    ended_at: float | None
    exit_code: int | None
    because: str
    failures: int
    losses: int
    request: RequestView
    outlook: NotRequired[OutlookView | None]
    """Present on request; null for a job that does not wait."""


class WrittenView(TypedDict):
    """Files of ranks that are removed with the attempt. `folder`: the only folder that holds them."""

    num_files: int
    num_bytes: int
    names: list[str]
    is_more: bool
    folder: str


class WorldView(TypedDict):
    """`is_whole`: the process group has a member for each of the job's `ranks`, wherever they are."""

    size: int
    ranks: int
    is_whole: bool


class AttemptView(TypedDict):
    """`rendezvous_round` counts restarts in place. `failure`: the last reason. `world`: the process group."""

    attempt_id: str
    epoch: int
    state: str
    nodes: list[str]
    queued_at: float
    placed_at: float | None
    started_at: float | None
    ended_at: float | None
    reason: str | None
    exit_code: int | None
    message: str
    rendezvous_round: int
    failure: str | None
    written: WrittenView | None
    world: WorldView | None


class ExplanationView(TypedDict):
    why: str
    sentence: str
    details: list[str]
    hint: str | None
    facts: dict[str, Any]


class JobDetailView(JobView):
    attempts: list[AttemptView]
    explanation: ExplanationView | None
    spec: dict[str, Any]
    archive: str | None


class JobPageView(TypedDict):
    """`array_id` is present if `ref` names a whole array; the one item is then its newest element."""

    items: list[JobView]
    next_cursor: str | None
    array_id: NotRequired[str]


class SubmitView(TypedDict):
    """`jobs` holds at most the first 100 of `count`."""

    jobs: list[JobView]
    count: int
    array_id: str | None
    was_repeated: bool


class WhyView(TypedDict):
    """`attempts` oldest first. After `max_failures` failures the job ends. `checkpoint_dir`: null before the
    first attempt, or if unknown. `checkpoint`: where ranks find it; null if nothing is kept.
    """

    job: JobView
    status: str
    explanation: ExplanationView | None
    sentence: str
    attempts: list[AttemptView]
    max_failures: int
    checkpoint: str | None
    checkpoint_dir: str | None
    outlook: NotRequired[OutlookView | None]


class StoppedView(TypedDict):
    array_id: str
    count: int
    jobs: list[JobView]


class LineView(TypedDict):
    """`stream` is `o`, `e`, `s` (setup) or `t` (stacks at a hang). `rank` is null for Shoal's own lines."""

    at: float
    node: str
    rank: int | None
    stream: str
    text: str


class LogPageView(TypedDict):
    items: list[LineView]
    next_cursor: str | None
    is_complete: bool


class MetricView(TypedDict):
    """One curve, along steps or along time (milliseconds since 1970). `node` is null for what ranks logged,
    `rank` for what nodes measured. A point is `[x, last, low, high]`; null is not a finite number. `newest`
    is the last reported `[x, value]`: after a restart that is not the point with the highest step.
    """

    name: str
    node: str | None
    axis: str
    rank: int | None
    heard_at: float
    low: float | None
    high: float | None
    newest: tuple[int, float | None]
    points: list[tuple[int, float | None, float | None, float | None]]


class MetricsView(TypedDict):
    """`status` is the job's: after its end no points are added."""

    ref: str
    name: str
    status: str
    items: list[MetricView]


class CheckpointView(TypedDict):
    """`state` is `complete` (every file has its size), `verified` (and its hash), `damaged`, `unfinished` or
    `unchecked` (newer ones took the whole time of this request). `is_next`: the checkpoint that the job would
    continue from. `epoch` and `rendezvous_round` belong to the attempt that saved it.
    """

    step: int
    epoch: int
    rendezvous_round: int
    saved_at: float
    size_bytes: int
    world_size: int | None
    places: list[str]
    state: str
    problem: str
    is_next: bool


class SaveDecisionView(TypedDict):
    """The interval between saves. `reason` is `every` (set by the program), `interval` (set by the job),
    `cost` (by Young and Daly, from `cost_s` and `mtbf_s`) or `first` (nothing is measured so far).
    """

    reason: str
    steps: int
    step_s: float
    cost_s: float | None
    written_s: float
    interval_s: float | None
    mtbf_s: float | None


class ProgramSaveView(TypedDict):
    """A file or folder (its name ends in `/`) that the program saved by itself. Nothing is verified.

    `problem`: why its size, or its time (then 0), is incomplete; empty if both are complete.
    """

    name: str
    saved_at: float
    size_bytes: int
    problem: str


class CheckpointsView(TypedDict):
    """What the job's directory holds, the newest first. The job writes there, so only the job vouches for it.

    `program_saves`: what is there besides the checkpoints of `runtime.Checkpoints`, the newest of
    `num_program_saves`. `has_more_program_saves`: there may be more, because one request reads a bounded
    number.
    """

    ref: str
    name: str
    status: str
    has_directory: bool
    items: list[CheckpointView]
    decision: SaveDecisionView | None
    program_saves: list[ProgramSaveView]
    num_program_saves: int
    has_more_program_saves: bool


class ArchiveView(TypedDict):
    digest: str
    size_bytes: int


class NodeGpuView(TypedDict):
    index: int
    kind: str


class UnansweredView(TypedDict):
    """The cluster does not answer. Its nodes are shown as of `since`. If `has_answered` is false, they are
    shown as of some earlier time, because the cluster has never answered this control plane.
    """

    since: float
    has_answered: bool


class NodeView(TypedDict):
    """`silent_jobs` are those of `jobs` without a report from this node for 20 s, whatever the cluster says
    of the node. `unanswered` is null if its cluster answers.
    """

    name: str
    pool: str
    state: str
    because: str
    by: str
    changed_at: float
    cpus: float
    memory_bytes: int
    disk_bytes: int
    gpus: list[NodeGpuView]
    gpus_used: float
    cpus_used: float
    memory_used_bytes: int
    is_simulated: bool
    is_alive: bool
    closed: str
    is_gone: bool
    is_busy: bool
    takes_work: bool
    confinement: str
    remarks: list[str]
    labels: dict[str, str]
    engine: str
    jobs: list[str]
    silent_jobs: list[str]
    unanswered: UnansweredView | None


class NodeDeclaredDeadView(NodeView):
    """`begin_anew`: the jobs that lose what they had there, and continue elsewhere."""

    begin_anew: list[str]


class NodePageView(TypedDict):
    items: list[NodeView]
    next_cursor: str | None


class EventView(TypedDict):
    seq: int
    at: float
    kind: str
    actor: str
    project: str | None
    job_id: str | None
    ref: str | None
    attempt_id: str | None
    node: str | None
    data: dict[str, Any]
    request_id: str | None
    hash: str


class EventPageView(TypedDict):
    """`next_cursor` is the next value for `after`; null when there is nothing newer now."""

    items: list[EventView]
    next_cursor: str | None


class HeadView(TypedDict):
    seq: int
    hash: str


class UserView(TypedDict):
    user_id: str
    name: str
    is_active: bool
    cluster_role: str | None
    created_at: float


class UserPageView(TypedDict):
    items: list[UserView]
    next_cursor: str | None


class AmountsView(TypedDict):
    """null: no amount is set for that device."""

    gpus: float | None
    cpus: float | None


class WindowView(TypedDict):
    """`project` and `because` are null and empty for a reservation of a project that you may not see.
    `still_there`: jobs that run there now and may still run when it begins; others are not named.
    """

    id: str
    kind: str
    nodes: list[str]
    from_at: float
    until_at: float
    project: str | None
    because: str
    by: str
    created_at: float
    still_there: list[str]


class WindowPageView(TypedDict):
    items: list[WindowView]
    next_cursor: str | None


class ProjectView(TypedDict):
    """`held` is in use now, by the project and all projects below it. `standing` is the project's part of the
    recent use among its siblings, divided by the part that its weight gives it: 2.0 had twice its part; null
    if no project used anything.
    """

    name: str
    parent: str | None
    role: str | None
    quota: AmountsView | None
    borrow: AmountsView | None
    limit: AmountsView | None
    weight: float
    held: AmountsView
    standing: float | None
    max_open_jobs: int
    max_jobs_per_day: int
    max_priority: int
    max_upload_bytes: int
    open_jobs: int
    created_at: float


class ProjectPageView(TypedDict):
    items: list[ProjectView]
    next_cursor: str | None


class MemberView(TypedDict):
    user: str
    project: str
    role: str


class MemberPageView(TypedDict):
    items: list[MemberView]
    next_cursor: str | None


class TokenView(TypedDict):
    """`parent` is the token that this one was made with."""

    id: str
    user_id: str
    user: str
    parent: str | None
    label: str
    scope: str
    project: str | None
    service: str | None
    created_at: float
    expires_at: float | None
    revoked_at: float | None


class NewTokenView(TokenView):
    """`text` is shown here and never again; null when the request was a repeated one."""

    text: str | None


class RevokedTokenView(TokenView):
    """`is_confirmed`: every data plane has confirmed that it refuses the token; else one may accept it for a
    while.

    `revoked_with_it`: ids of tokens that ended because they were made with it. `kept`: those that did not.
    """

    is_confirmed: bool
    revoked_with_it: list[str]
    kept: list[str]


class TokenPageView(TypedDict):
    items: list[TokenView]
    next_cursor: str | None


class RoleView(TypedDict):
    name: str
    role: str


class TokenFactsView(TypedDict):
    id: str | None
    scope: str | None
    project: str | None
    expires_at: float | None


class MeView(TypedDict):
    """`now`: the clock of the control plane."""

    actor: str
    user: str
    cluster_role: str | None
    projects: list[RoleView]
    token: TokenFactsView
    now: float


class RenewalReplyView(TypedDict):
    should_stop: bool
    grace_s: float
    because: str
    is_stale: bool
    rendezvous_round: int
    master_port: int | None
    is_after_hang: bool
    drill: dict[str, Any] | None
    should_sleep: bool | None
    control_urls: list[str]
    proof: str


class TaskAssignmentView(TypedDict):
    """`shoal.wire.TaskAssignment`: what a supervisor has to do, and with which credentials."""

    task_spec: dict[str, Any]
    credentials: dict[str, Any]
    has_archive: bool


class StatusReplyView(TypedDict):
    size: int
    stop_grace_s: float | None
    is_recorded: bool
    control_urls: list[str]


class SelfView(TypedDict):
    """What a running job may read about itself."""

    job: JobView
    attempt: AttemptView


class NodeRemovedView(TypedDict):
    name: str


class RemovedView(TypedDict):
    user: str
    project: str


class ProblemView(TypedDict, total=False):
    """RFC 9457. `code` is stable; `hint` ends with something to type."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    hint: str
    problems: list[str]
    request_id: str
