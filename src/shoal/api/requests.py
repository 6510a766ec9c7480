"""What clients may send. Unknown fields are refused, and nothing is guessed: `"5"` is not 5."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from shoal.model.people import Devices, Role
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
    """Files of the submitter's folder that are not in the archive: named where a job does not find one."""

    folder: Annotated[str, StringConstraints(max_length=4096)] = ""
    ignored: Annotated[list[FileName], Field(max_length=2000)] = []
    excluded: Annotated[list[FileName], Field(max_length=200)] = []

    @model_validator(mode="after")
    def _is_short(self) -> Self:
        size = sum(len(name.encode()) for name in (self.folder, *self.ignored, *self.excluded))
        if size > MAX_LEFT_BEHIND:
            raise ValueError(f"its names are {size:,} bytes long; at most {MAX_LEFT_BEHIND:,}")
        return self

    def told(self) -> LeftBehind:
        return LeftBehind(folder=self.folder, ignored=tuple(self.ignored), excluded=tuple(self.excluded))


class SubmitBody(Body):
    """A job to run: `spec` is what a YAML file says, `flags` what was typed after `shoal run`.

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
            raise ValueError("the job is `spec` or `flags`, one of the two")
        return self


class ServeBody(Body):
    """A service to run, or a new release of one: `spec` is what a YAML file says."""

    spec: dict[str, Any]
    project: Name | None = None
    secrets: Secrets = Field(default_factory=dict)
    archive: Digest | None = None
    left_behind: LeftBehindBody | None = None


class ScaleBody(Body):
    """At least and at most so many replicas."""

    min: Annotated[int, Field(ge=0, le=1000)]
    max: Annotated[int, Field(ge=0, le=1000)]

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"`max`, {self.max}, is below `min`, {self.min}")
        return self


class RolloutBody(Body):
    """`undo`: back to the release before. `promote`: a canary is watched no longer."""

    action: Literal["undo", "promote"]


class ReportBody(Body):
    """What a data plane counts: see `serving/table.py`."""

    model_config = ConfigDict(extra="allow")

    process_id: Annotated[str, StringConstraints(min_length=1, max_length=100)]
    version: int


class NodeBody(Body):
    """Why a node is closed or opened."""

    because: Text = ""


class NewWindow(Body):
    """Nodes that are not for everybody from `from_at` (now, if not given) on: named, or `count` of a pool.

    `reservation`: they are for one project. `maintenance`: for nobody.
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
    """Goodput is measured over `window_s`; a job that has not gone on after `within_s` has not recovered.

    `is_forced`: also where it would be the end of the job.
    """

    window_s: Annotated[float, Field(ge=0, le=600, allow_inf_nan=False)] = 20.0
    within_s: Annotated[float, Field(ge=1, le=600, allow_inf_nan=False)] = 120.0
    is_forced: bool = False


class JobDrill(DrillBody):
    """A drill of a job's ranks; `rank`: the last, if not given."""

    kind: Literal["kill-rank", "hang", "corrupt-checkpoint"]
    rank: Annotated[int, Field(ge=0, le=10_000_000)] | None = None


class ClusterDrill(DrillBody):
    """A drill of a node of a job (the last, if not given), or of the control plane, which is of no job."""

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
    """So many devices. Nothing is said about one that is not named; none named is as good as null."""

    gpus: Annotated[int, Field(ge=0, le=10_000_000)] | None = None
    cpus: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] | None = None

    def read(self) -> Devices | None:
        return None if self.gpus is self.cpus is None else Devices(gpus=self.gpus, cpus=self.cpus)


class ProjectLimits(Body):
    """Only what is sent is changed. `parent`, `quota`, `limit` and `borrow` are taken away by null."""

    max_open_jobs: Annotated[int, Field(ge=0, le=10_000_000)] | None = None
    max_jobs_per_day: Annotated[int, Field(ge=0, le=1_000_000_000)] | None = None
    max_priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    max_upload_bytes: Annotated[int, Field(ge=0, le=MAX_BIG)] | None = None
    parent: Name | None = None
    quota: DevicesBody | None = None
    limit: DevicesBody | None = None
    borrow: DevicesBody | None = None
    weight: Annotated[float, Field(ge=0.001, le=1e6, allow_inf_nan=False)] | None = None

    def given(self) -> dict[str, Any]:
        """What was sent, by field of `Project`."""
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
    """A token for oneself, or for `user` where an admin asks. Never more than the token it is made with.

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
    incarnation: int = 0
    phase: Literal["preparing", "running", "stopping", "ended"]
    started_at: float | None = None
    outcome: dict[str, Any] | None = None
    saved_s: float | None = None
    generation: int = 0
    master_port: int | None = None
    failure: dict[str, Any] | None = None
    recovery: dict[str, Any] | None = None
    metrics: list[dict[str, Any]] = []
    progress: dict[str, Any] | None = None
    signs: dict[str, Any] | None = None
    world: dict[str, Any] | None = None
    drilled: dict[str, Any] | None = None
    serving: dict[str, Any] | None = None
    wait_s: float = 0.0
    nonce: str = ""
    proof_version: int = 1


class FetchBody(BaseModel):
    """`shoal.wire.Fetch`, described."""

    attempt_id: str
    node: str
    incarnation: int = 0
    process: str
    after: int | None = None


class NoBody(Body):
    """Nothing is needed; `{}` or no body at all."""


def role(word: str | None) -> Role | None:
    """The role a checked word names."""
    return Role(word) if word is not None else None
