"""The job spec: a person's request, validated and frozen, with its one canonical JSON form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from shoal.spec.array import Array
from shoal.spec.error_text import show
from shoal.spec.job_fields import (
    Afters,
    Checkpoint,
    Deadline,
    Fence,
    Grace,
    JobNetwork,
    LogRules,
    Mounts,
    Priority,
    Retry,
    RetrySpec,
    TimeLimit,
    Topology,
)
from shoal.spec.launchers import LauncherRequest, launcher_request
from shoal.spec.resources import MAX_NODES, Resources, Switch
from shoal.spec.text import (
    MAX_ENV_STRING,
    EnvName,
    FilePatterns,
    Folder,
    JobName,
    Name,
    Script,
    ShortForms,
    writable,
)

MAX_ENV_BYTES = 256 << 10
MAX_RANKS = 1024


def _whole_as_text(value: object) -> object:
    """`3` as `"3"`: there is one way to write a whole number. Other numbers have several, so they must be
    quoted.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() <= 64:
        return str(value)
    return value


def _fits_execve(env: dict[str, str]) -> dict[str, str]:
    total = 0
    for name, value in env.items():
        size = len(name) + len(value.encode()) + 2
        total += size
        if size > MAX_ENV_STRING:
            raise ValueError(f"{show(name)} is {size:,} bytes long; Linux takes at most {MAX_ENV_STRING:,}")
    if total > MAX_ENV_BYTES:
        raise ValueError(f"is {total:,} bytes in all; at most {MAX_ENV_BYTES:,}. Put large values in a file")
    return env


EnvValue = Annotated[
    str, Field(strict=True), AfterValidator(writable), ShortForms(_whole_as_text, ({"type": "integer"},))
]
Env = Annotated[dict[EnvName, EnvValue], AfterValidator(_fits_execve)]


def check_secret_names(secrets: tuple[str, ...], env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names if each occurs once and none is also in `env`."""
    for position, name in enumerate(secrets):
        if name in env:
            raise ValueError(f"{show(name)} is also set in `env`; keep one of the two")
        if name in secrets[:position]:
            raise ValueError(f"{show(name)} is there twice")
    return secrets


def check_has_folder(patterns: tuple[str, ...], workdir: str | None) -> tuple[str, ...]:
    """Return the patterns of `include` or `exclude`, if there is a workdir whose files they can match."""
    if patterns and workdir is None:
        raise ValueError("names files of `workdir`, which is null; name the folder, or leave this out")
    return patterns


def check_launchers(launch: LauncherRequest, resources: Resources, ranks_per_node: int | None) -> None:
    """Raise `ValueError` if a launcher would start more than the job has.

    If the job has one rank on each node, the launcher itself may start more of them there.
    """
    nodes = resources.nodes
    is_said = (nodes.min, nodes.max) != (1, 1) or "nodes" in resources.model_fields_set
    if launch.nodes is not None:
        low, high = launch.nodes
        wanted = str(low) if low == high else f"{low}..{high}"
        if low > MAX_NODES or high < low:
            raise ValueError(f"asks for {wanted} nodes; a job may have {MAX_NODES:,} at most")
        if is_said and (high < nodes.min or low > nodes.max):
            job_nodes = str(nodes.min) if nodes.min == nodes.max else f"{nodes.min}..{nodes.max}"
            raise ValueError(f"asks for {wanted} nodes, and `nodes` is {job_nodes}; leave one of the two out")
    each = launch.per_node
    if each is not None and ranks_per_node not in (None, 1, each):
        raise ValueError(
            f"asks for {each} processes on a node, and `ranks_per_node` is {ranks_per_node}; "
            "leave one of the two out"
        )


class JobSpec(BaseModel):
    """Every field but `run` is optional. Resources are for each node."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: JobName | None = Field(default=None, description="The job's name for people; need not be unique.")
    project: Name | None = Field(
        default=None, description="The project of the job; unset: the submitter's only project."
    )
    queue: Name = Field(default="default", description="A queue of the cluster.")
    priority: Priority = Field(
        default=0, description="Higher goes first: a number, or the name of a class that the cluster has."
    )
    time_limit: TimeLimit | None = Field(
        default=None, description="The job is stopped after this time: seconds, `90m`, `1h30m`."
    )
    deadline: Deadline | None = Field(
        default=None,
        description="When the job should have ended: `2026-11-16T08:00` or `14:00`, in UTC, or `6h` "
        "after submission.",
    )
    resources: Resources = Resources.model_construct()
    ranks_per_node: Annotated[int, Field(strict=True, ge=1, le=MAX_RANKS)] | None = Field(
        default=None, description="Processes on each node; unset: one for each GPU, or one."
    )
    workdir: Folder | None = Field(
        default=".", description="The folder to run in, copied at submission; null: an empty folder."
    )
    include: FilePatterns = Field(
        default=(),
        description="Files of `workdir` to copy although git ignores them, as in .gitignore: `data/`, "
        "`*.bin`.",
    )
    exclude: FilePatterns = Field(
        default=(), description="Files of `workdir` not to copy, as in .gitignore; overrides `include`."
    )
    setup: Script | None = Field(default=None, description="Run once on each node before the ranks.")
    run: Script = Field(description="The command of every rank, for a shell.")
    env: Env = {}
    secrets: Annotated[tuple[EnvName, ...], Field(max_length=256)] = Field(
        default=(),
        description="Names of variables taken from the submitter's environment and never stored in the spec.",
    )
    mounts: Mounts = ()
    after: Afters = Field(default=(), description="Jobs to wait for.")
    array: Array | None = Field(
        default=None, description="Run once for each index: `0..99`, `100`, `0-99%10`."
    )
    retry: Retry = RetrySpec.model_construct()
    checkpoint: Checkpoint | None = Field(
        default=None,
        description="Keep a directory from one attempt to the next: `{}`, or a path such as `ckpt`.",
    )
    shared: Switch = Field(
        default=False,
        description="All nodes work in one folder, in a directory that they share; otherwise each node "
        "has a copy.",
    )
    log_rules: LogRules = ()
    world: Literal["whole", "any"] = Field(
        default="whole",
        description="`any`: accept process groups that do not span all ranks of the job.",
    )
    topology: Topology | None = None
    grace: Grace = Field(default=30.0, description="Time from the first signal to the kill.")
    network: JobNetwork = Field(
        default="closed",
        description="Which programs may connect to its ports, if the node can enforce it: `closed`: "
        "programs of its own project; `open`: of every project.",
    )
    fence: Fence = Field(
        default=1800.0,
        description="A supervisor cut off for this long stops its ranks, and only then are they replaced.",
    )

    @field_validator("include", "exclude", mode="after")
    @classmethod
    def _files_have_a_folder(cls, patterns: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        return check_has_folder(patterns, info.data.get("workdir", "."))

    @field_validator("run", mode="after")
    @classmethod
    def _launcher_agrees(cls, run: str, info: ValidationInfo) -> str:
        resources = info.data.get("resources")
        if resources is not None:
            check_launchers(launcher_request(run), resources, info.data.get("ranks_per_node"))
        return run

    @field_validator("secrets", mode="after")
    @classmethod
    def _secrets_stand_alone(cls, secrets: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        return check_secret_names(secrets, info.data.get("env", {}))

    @field_validator("checkpoint", mode="after")
    @classmethod
    def _checkpoint_stands_alone(
        cls, checkpoint: Checkpoint | None, info: ValidationInfo
    ) -> Checkpoint | None:
        targets = {mount.target for mount in info.data.get("mounts", ())}
        if checkpoint is not None and checkpoint.path in targets:
            raise ValueError(f"{show(checkpoint.path)} is also the target of a mount; keep one of the two")
        return checkpoint

    def canonical(self) -> dict[str, Any]:
        """Return plain data with defaults left out. Parsing it gives an equal spec."""
        return self.model_dump(mode="json", exclude_defaults=True)

    def canonical_json(self) -> str:
        """The one text of this spec: equal specs have equal texts. `model_validate_json` reads it back."""
        return json.dumps(self.canonical(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
