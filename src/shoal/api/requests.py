"""The bodies that clients may send. Unknown fields are refused, and nothing is guessed: `"5"` is not 5."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from shoal.model.people import DeviceAmounts, Role
from shoal.wire import LeftBehind

NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,62}$"
ENV_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]{0,99}$"
DIGEST_PATTERN = r"^[0-9a-f]{64}$"
TEXT_PATTERN = r"^[^\x00-\x1f\x7f]*$"
MAX_SECRETS = 100
MAX_FLAGS = 100
REMOVABLE = frozenset({"parent", "quota", "limit", "borrow"})
MAX_BIG = 2**53
MAX_LEFT_BEHIND = 32 << 10

Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Text = Annotated[str, StringConstraints(max_length=500, pattern=TEXT_PATTERN)]
NodeName = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=TEXT_PATTERN)]
ClusterRole = Literal["operator", "admin"]
ProjectRole = Literal["viewer", "member", "lead"]
RoleWord = Literal["viewer", "member", "lead", "operator", "admin"]


class Body(BaseModel):
    """Base of every body."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


Secrets = Annotated[
    dict[
        Annotated[str, StringConstraints(pattern=ENV_PATTERN)],
        Annotated[str, StringConstraints(max_length=64 << 10)],
    ],
    Field(max_length=MAX_SECRETS),
]
Digest = Annotated[str, StringConstraints(pattern=DIGEST_PATTERN)]


FileName = Annotated[str, StringConstraints(min_length=1, max_length=4096)]


class LeftBehindBody(Body):
    """Files of the submitter's folder that are not in the archive. If a job does not find such a file, Shoal
    names it.
    """

    folder: Annotated[str, StringConstraints(max_length=4096)] = ""
    ignored: Annotated[list[FileName], Field(max_length=2000)] = []
    excluded: Annotated[list[FileName], Field(max_length=200)] = []

    @model_validator(mode="after")
    def _is_short(self) -> Self:
        size = sum(len(name.encode()) for name in (self.folder, *self.ignored, *self.excluded))
        if size > MAX_LEFT_BEHIND:
            raise ValueError(f"its names are {size:,} bytes long; at most {MAX_LEFT_BEHIND:,}")
        return self

    def to_wire(self) -> LeftBehind:
        return LeftBehind(folder=self.folder, ignored=tuple(self.ignored), excluded=tuple(self.excluded))


class SubmitBody(Body):
    """A job to run: `spec` is the content of a YAML file, `flags` are the flags of `shoal run`.

    Secrets travel beside it, and are kept sealed.
    """

    spec: dict[str, Any] | None = None
    flags: Annotated[dict[str, str | list[str]], Field(max_length=MAX_FLAGS)] | None = None
    project: Name | None = None
    secrets: Secrets = Field(default_factory=dict)
    archive: Digest | None = None
    left_behind: LeftBehindBody | None = None

    @model_validator(mode="after")
    def _one_job(self) -> Self:
        if (self.spec is None) == (self.flags is None):
            raise ValueError("give the job as `spec` or as `flags`, not both")
        return self


class ServeBody(Body):
    """A service to run, or a new release of a service: `spec` is the content of a YAML file."""

    spec: dict[str, Any]
    project: Name | None = None
    secrets: Secrets = Field(default_factory=dict)
    archive: Digest | None = None
    left_behind: LeftBehindBody | None = None


class ScaleBody(Body):
    """The least and the most replicas."""

    min: Annotated[int, Field(ge=0, le=1000)]
    max: Annotated[int, Field(ge=0, le=1000)]

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"`max`, {self.max}, is below `min`, {self.min}")
        return self


class RolloutBody(Body):
    """`undo`: back to the previous release. `promote`: stop watching a canary and continue."""

    action: Literal["undo", "promote"]


class ReportBody(Body):
    """The counts of a data plane: see `serving/table.py`."""

    model_config = ConfigDict(extra="allow")

    process_id: Annotated[str, StringConstraints(min_length=1, max_length=100)]
    version: int


class NodeBody(Body):
    """Why a node is closed or opened."""

    because: Text = ""


class NewWindow(Body):
    """A maintenance window or reservation from `from_at` (default: now), of named nodes or of `count` nodes
    of a pool.

    `reservation`: the nodes are for one project. `maintenance`: they take no jobs.
    """

    kind: Literal["maintenance", "reservation"]
    nodes: Annotated[list[NodeName], Field(max_length=10_000)] = []
    count: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    pool: NodeName | None = None
    from_at: Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)] | None = None
    duration_s: Annotated[float, Field(ge=60, le=366 * 86400, allow_inf_nan=False)]
    project: Name | None = None
    because: Text = ""


class DrillBody(Body):
    """Goodput is measured over `window_s`. A job that has not continued after `within_s` has not recovered.

    `is_forced`: also if the drill would end the job.
    """

    window_s: Annotated[float, Field(ge=0, le=600, allow_inf_nan=False)] = 20.0
    within_s: Annotated[float, Field(ge=1, le=600, allow_inf_nan=False)] = 120.0
    is_forced: bool = False


class JobDrill(DrillBody):
    """A drill of a job's ranks. `rank`: the last, by default."""

    kind: Literal["kill-rank", "hang", "corrupt-checkpoint"]
    rank: Annotated[int, Field(ge=0, le=10_000_000)] | None = None


class ClusterDrill(DrillBody):
    """A drill of a node of a job (the last, by default), or of the control plane, which belongs to no job."""

    kind: Literal["kill-node", "partition", "kill-control"]
    job_id: NodeName | None = None
    node: NodeName | None = None
    for_s: Annotated[float, Field(ge=0, le=600, allow_inf_nan=False)] = 0.0


class NewUser(Body):
    name: Name
    cluster_role: ClusterRole | None = None


class UserChange(Body):
    """Only what is sent is changed."""

    is_active: bool | None = None
    cluster_role: ClusterRole | None = None


class DevicesBody(Body):
    """Amounts of devices. A device that is not named stays unset; naming none is the same as null."""

    gpus: Annotated[int, Field(ge=0, le=10_000_000)] | None = None
    cpus: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] | None = None

    def read(self) -> DeviceAmounts | None:
        return None if self.gpus is self.cpus is None else DeviceAmounts(gpus=self.gpus, cpus=self.cpus)


class ProjectLimits(Body):
    """Only what is sent is changed. Null removes `parent`, `quota`, `limit` and `borrow`."""

    max_open_jobs: Annotated[int, Field(ge=0, le=10_000_000)] | None = None
    max_jobs_per_day: Annotated[int, Field(ge=0, le=1_000_000_000)] | None = None
    max_priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    max_upload_bytes: Annotated[int, Field(ge=0, le=MAX_BIG)] | None = None
    parent: Name | None = None
    quota: DevicesBody | None = None
    limit: DevicesBody | None = None
    borrow: DevicesBody | None = None
    weight: Annotated[float, Field(ge=0.001, le=1e6, allow_inf_nan=False)] | None = None

    def changed_fields(self) -> dict[str, Any]:
        """The sent fields, by field of `Project`."""
        sent: dict[str, Any] = {}
        for name in ProjectLimits.model_fields:
            value = getattr(self, name)
            if value is not None or (name in REMOVABLE and name in self.model_fields_set):
                sent[name] = value.read() if isinstance(value, DevicesBody) else value
        return sent


class NewProject(ProjectLimits):
    name: Name


class MemberBody(Body):
    role: ProjectRole


class NewToken(Body):
    """A token for oneself, or for `user` if an admin asks. It never has more rights than the token it is made
    with.

    `service`: to call that service of `project`, and for nothing else.
    """

    label: Text = ""
    user: Name | None = None
    scope: RoleWord | None = None
    project: Name | None = None
    service: Text | None = Field(default=None, max_length=100)
    lifetime_s: Annotated[float, Field(gt=0, le=10 * 365 * 86400, allow_inf_nan=False)] | None = None


class RenewalBody(BaseModel):
    """`shoal.wire.Renewal`, described. Unknown fields are ignored, so either side may be newer."""

    attempt_id: str
    epoch: int
    node: str
    replacement: int = 0
    phase: Literal["preparing", "running", "stopping", "ended"]
    started_at: float | None = None
    outcome: dict[str, Any] | None = None
    saved_s: float | None = None
    rendezvous_round: int = 0
    master_port: int | None = None
    failure: dict[str, Any] | None = None
    recovery: dict[str, Any] | None = None
    metrics: list[dict[str, Any]] = []
    progress: dict[str, Any] | None = None
    signs: dict[str, Any] | None = None
    world: dict[str, Any] | None = None
    drill_result: dict[str, Any] | None = None
    replica_status: dict[str, Any] | None = None
    wait_s: float = 0.0
    nonce: str = ""
    proof_version: int = 1


class TaskSpecRequestBody(BaseModel):
    """`shoal.wire.TaskSpecRequest`, described."""

    attempt_id: str
    node: str
    replacement: int = 0
    process: str
    previous_replacement: int | None = None


class NoBody(Body):
    """No fields; `{}` or no body at all."""


def role(word: str | None) -> Role | None:
    """The role that a checked word names."""
    return Role(word) if word is not None else None
