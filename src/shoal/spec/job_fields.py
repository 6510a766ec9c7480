"""The smaller parts of a job: mounts, dependencies, retries, checkpoints, log rules, topology."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, Field, model_validator

from shoal.spec.error_text import show
from shoal.spec.quantity import SECONDS_PATTERN, format_seconds, parse_moment, parse_seconds, parse_whole
from shoal.spec.resources import FROZEN
from shoal.spec.text import (
    AbsolutePath,
    OrName,
    Path,
    ShortForms,
    absolute_path,
    checked_pattern,
    text_schema,
    writable,
)

MAX_SECONDS = 3650 * 86400.0
MAX_RETRIES = 1000
MAX_REGEX = 1000
JOB_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._-]*(?:/[0-9]+)?$"
LEVEL_PATTERN = r"^[A-Za-z][A-Za-z0-9._-]*$"
KERNEL_FOLDERS = ("/proc", "/sys", "/dev")

DependencyCondition = Literal["succeeded", "failed", "ended"]
RetryOn = Literal["exit", "signal", "oom", "setup", "time_limit"]
RuleActionName = Literal["exclude_node", "stop_retries"]
JobNetwork = Literal["closed", "open"]
TopologyMode = Literal["required", "preferred"]


def seconds_between(low: float, high: float) -> ShortForms:
    """Return the short forms of a time from `low` to `high` seconds."""

    def read(value: object) -> object:
        if value is None:
            return None
        seconds = parse_seconds(value)
        if not low <= seconds <= high:
            bounds = f"from {format_seconds(low)} to {format_seconds(high)}"
            raise ValueError(f"{show(value)} is {format_seconds(seconds)}; {bounds}")
        return seconds

    return ShortForms(read, (text_schema(SECONDS_PATTERN, "90s", "1h30m", "12:00:00"),))


MIN_FENCE_S = 60
"""Twelve renewals of a lease: one that is late or lost must not look like a partition."""

TimeLimit = Annotated[
    float, Field(strict=True, ge=1, le=MAX_SECONDS, allow_inf_nan=False), seconds_between(1, MAX_SECONDS)
]
Grace = Annotated[float, Field(strict=True, ge=0, le=86400, allow_inf_nan=False), seconds_between(0, 86400)]
Fence = Annotated[
    float,
    Field(strict=True, ge=MIN_FENCE_S, le=30 * 86400, allow_inf_nan=False),
    seconds_between(MIN_FENCE_S, 30 * 86400),
]
Backoff = Annotated[float, Field(strict=True, ge=0, le=3600, allow_inf_nan=False), seconds_between(0, 3600)]


def _read_deadline(value: object) -> object:
    """The text as it was written. Only the submission knows the moment it counts from."""
    if value is None:
        return None
    parse_moment(value, 0.0)
    if isinstance(value, str):
        return value.strip()
    seconds = parse_seconds(value)
    if not 1 <= seconds <= MAX_SECONDS:
        raise ValueError(f"{show(value)} is not between 1 second and {format_seconds(MAX_SECONDS)}")
    return f"{seconds:.0f}" if seconds == int(seconds) else f"{seconds:.3f}"


Deadline = Annotated[
    str,
    Field(strict=True, max_length=64),
    ShortForms(_read_deadline, ({"type": "number", "minimum": 1, "maximum": MAX_SECONDS},)),
]

MAX_PRIORITY = 1000
Priority = Annotated[
    int | str,
    OrName(
        r"[a-z][a-z0-9_-]{0,62}",
        Annotated[int, Field(strict=True, ge=-MAX_PRIORITY, le=MAX_PRIORITY)],
        ("batch", "production"),
    ),
]


def _mount_target(path: str) -> str:
    clean = absolute_path(path).rstrip("/")
    if not clean or any(f"{clean}/".startswith(f"{folder}/") for folder in KERNEL_FOLDERS):
        raise ValueError(f"{show(path)} cannot be covered by a mount; choose a path such as `/data`")
    return clean


class MountSpec(BaseModel):
    """A directory of the node, seen by the ranks at `target`."""

    model_config = FROZEN

    source: AbsolutePath
    target: Annotated[AbsolutePath, AfterValidator(_mount_target)]
    read_only: Annotated[bool, Field(strict=True)] = False


_MOUNT = re.compile(r"([^:]+):([^:]+?)(?::(ro|rw))?")


def _read_mount(value: object) -> object:
    if isinstance(value, Mapping | MountSpec):
        return value
    match = _MOUNT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{show(value)} is not a mount such as `/srv/data:/data` or `/srv/data:/data:ro`")
    return {"source": match[1], "target": match[2], "read_only": match[3] == "ro"}


def _read_mounts(value: object) -> object:
    """Read `{/data: /srv/data}` or `{/data: "/srv/data:ro"}` as a list, in order."""
    if not isinstance(value, Mapping):
        return value
    return [
        {"source": source.removesuffix(":ro"), "target": target, "read_only": source.endswith(":ro")}
        if isinstance(source, str)
        else {"source": source, "target": target}
        for target, source in value.items()
    ]


def _distinct_targets(mounts: tuple[MountSpec, ...]) -> tuple[MountSpec, ...]:
    seen: set[str] = set()
    for mount in mounts:
        if mount.target in seen:
            raise ValueError(f"{show(mount.target)} is the target of two mounts")
        seen.add(mount.target)
    return mounts


Mounts = Annotated[
    tuple[
        Annotated[
            MountSpec, ShortForms(_read_mount, (text_schema("[^:]+:[^:]+(?::r[ow])?", "/srv/data:/data:ro"),))
        ],
        ...,
    ],
    Field(max_length=64),
    AfterValidator(_distinct_targets),
    ShortForms(
        _read_mounts, ({"type": "object", "additionalProperties": {"type": "string", "pattern": "^/"}},)
    ),
]


class AfterSpec(BaseModel):
    """Wait for another job: by number, `project/number`, id, or name (the newest of that name)."""

    model_config = FROZEN

    job: Annotated[
        str,
        Field(strict=True, min_length=1, max_length=210, pattern=JOB_PATTERN),
    ]
    on: DependencyCondition = "succeeded"


def _read_after(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        if not 1 <= value < 2**63:
            raise ValueError(f"{show(value)} is not a job's number")
        return {"job": str(value)}
    if not isinstance(value, str):
        return value
    job, colon, how = value.partition(":")
    return {"job": job, "on": how} if colon else {"job": job}


def _read_afters(value: object) -> object:
    return [value] if isinstance(value, str | int) and not isinstance(value, bool) else value


_AFTER_FORMS = (
    text_schema("[A-Za-z0-9_][A-Za-z0-9._/-]*(?::(?:succeeded|failed|ended))?", "17", "train:ended"),
    {"type": "integer", "minimum": 1},
)
Afters = Annotated[
    tuple[Annotated[AfterSpec, ShortForms(_read_after, _AFTER_FORMS)], ...],
    Field(max_length=1000),
    ShortForms(_read_afters, _AFTER_FORMS),
]


def _read_list(value: object) -> object:
    """`exit,oom` or `exit` as a list."""
    return [word.strip() for word in value.split(",")] if isinstance(value, str) else value


def _each_once(on: tuple[RetryOn, ...]) -> tuple[RetryOn, ...]:
    """In the order of the definition, so that equal policies are equal specs."""
    if not on:
        raise ValueError("is empty; leave it out for `exit` and `signal`")
    return tuple(reason for reason in get_args(RetryOn) if reason in on)


class RetrySpec(BaseModel):
    """Retries of the program's own failures. Shoal repeats for free what the cluster loses."""

    model_config = FROZEN

    max: Annotated[int, Field(strict=True, ge=0, le=MAX_RETRIES)] = 0
    on: Annotated[
        tuple[RetryOn, ...],
        Field(max_length=16, json_schema_extra={"minItems": 1}),
        AfterValidator(_each_once),
        ShortForms(_read_list, ({"type": "string", "examples": ["exit,oom"]},)),
    ] = ("exit", "signal")
    backoff: Backoff = Field(
        default=5.0, description="Before the first retry; doubles each time, up to an hour."
    )
    in_place: Annotated[bool, Field(strict=True)] = Field(
        default=True,
        description="First restart failed ranks on the nodes they have, at once and from warm processes.",
    )
    standby: Annotated[bool, Field(strict=True)] = Field(
        default=True,
        description="Keep a process on each of several nodes that takes over at once when a node's task"
        " is lost.",
    )


def read_retry(value: object) -> object:
    """A number of retries as `{max: number}`."""
    if isinstance(value, Mapping | RetrySpec):
        return value
    count = parse_whole(value)
    if not 0 <= count <= MAX_RETRIES:
        raise ValueError(f"{show(value)} retries; from 0 to {MAX_RETRIES:,}")
    return {"max": count}


Retry = Annotated[
    RetrySpec, ShortForms(read_retry, ({"type": "integer", "minimum": 0, "maximum": MAX_RETRIES},))
]


def _checkpoint_path(path: str) -> str:
    """The shortest spelling of the path. Refuses a path that could not be a directory of its own."""
    clean = str(PurePosixPath(path))
    if clean.startswith("/"):
        return _mount_target("/" + clean.lstrip("/"))
    if clean == ".":
        raise ValueError(f"{show(path)} is the work directory itself; name a folder in it, such as `ckpt`")
    return clean


class CheckpointSpec(BaseModel):
    """A directory of the job's own, kept from one attempt to the next and after the job's end.

    Every rank gets it as SHOAL_CHECKPOINT_DIR. No job of another project can read it. On nodes that confine
    with bubblewrap no other job can, except services whose `model` it is. `{}` is enough.
    """

    model_config = FROZEN

    path: Annotated[Path, AfterValidator(_checkpoint_path)] | None = Field(
        default=None,
        description="Where the program expects it: `ckpt` is a link in the work directory, `/ckpt` a "
        "mount. Unset: only at SHOAL_CHECKPOINT_DIR.",
    )
    interval: TimeLimit | None = Field(
        default=None,
        description="How often `runtime.Checkpoints` saves, whatever the program asks for. Unset: as "
        "the program asks, else by the cost of a save and the job's rate of failures. Ranks"
        " get it in seconds as SHOAL_CHECKPOINT_INTERVAL_S.",
    )


def read_checkpoint(value: object) -> object:
    """A path as `{path: ...}`."""
    return {"path": value} if isinstance(value, str) else value


Checkpoint = Annotated[CheckpointSpec, ShortForms(read_checkpoint, ({"type": "string", "minLength": 1},))]


class LogRuleSpec(BaseModel):
    """A regular expression searched in every log line, and the action for a match."""

    model_config = FROZEN

    match: Annotated[
        str,
        Field(strict=True, min_length=1, max_length=MAX_REGEX),
        AfterValidator(writable),
        AfterValidator(checked_pattern),
    ]
    action: RuleActionName


def _read_log_rules(value: object) -> object:
    """`{regex: action}` as a list, in order."""
    if not isinstance(value, Mapping):
        return value
    return [{"match": match, "action": action} for match, action in value.items()]


LogRules = Annotated[
    tuple[LogRuleSpec, ...],
    Field(max_length=64),
    ShortForms(
        _read_log_rules,
        ({"type": "object", "additionalProperties": {"enum": list(get_args(RuleActionName))}},),
    ),
]


Level = Annotated[str, Field(strict=True, min_length=1, max_length=63, pattern=LEVEL_PATTERN)]


class TopologySpec(BaseModel):
    """All nodes `within` one domain of a level, such as `rack`; or `spread`: no two nodes in
    the same domain.
    """

    model_config = FROZEN

    within: Level | None = None
    mode: TopologyMode = "required"
    spread: Level | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.within is None and self.spread is None:
            raise ValueError("has neither `within` nor `spread`; write a level, such as `within: rack`")
        if self.within == self.spread:
            raise ValueError(f"has {show(self.within)} as `within` and as `spread`; keep one of the two")
        return self


def _read_topology(value: object) -> object:
    if not isinstance(value, str):
        return value
    level, colon, mode = value.partition(":")
    if colon and level == "spread":
        return {"spread": mode}
    return {"within": level, "mode": mode} if colon else {"within": level}


Topology = Annotated[
    TopologySpec,
    ShortForms(
        _read_topology,
        (
            text_schema(
                "[A-Za-z][A-Za-z0-9._-]*(?::(?:required|preferred))?|spread:[A-Za-z][A-Za-z0-9._-]*",
                *("rack", "rack:preferred", "spread:rack"),
            ),
        ),
    ),
]
