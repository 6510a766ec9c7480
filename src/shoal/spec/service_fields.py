"""The smaller parts of a service: how many replicas, when one is ready, scaling, rollouts, limits."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field

from shoal.spec.error_text import show
from shoal.spec.job_fields import JOB_PATTERN, seconds_between
from shoal.spec.quantity import parse_whole
from shoal.spec.resources import FROZEN, Range, read_range
from shoal.spec.text import OrName, ShortForms, text_schema, writable

MAX_REPLICAS = 1000
DAY_S = 86400.0
HTTP_PATH_PATTERN = r"^/[!-~]*$"
HOST_PATTERN = r"^[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?$"
ORIGIN_PATTERN = r"^(?:\*|https?://[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?(?::[0-9]{1,5})?)$"
AFFINITY_PATTERN = r"^(?:header|cookie):[A-Za-z0-9_-]+$"
SAVE_PATTERN = r"^step-[0-9]{12}-[0-9]+-[0-9]+$"

Target = Literal["concurrency", "rps", "queue", "tokens"]
Strategy = Literal["rolling", "canary"]
Balance = Literal["least", "tokens"]
LimitScope = Literal["token", "project"]
Network = Literal["closed", "open", "private"]


class ReplicaRange(Range):
    """How many replicas: always `min`, up to `max` if `scale` needs them. Both ends are needed."""

    min: Annotated[int, Field(strict=True, ge=0, le=MAX_REPLICAS)]
    max: Annotated[int, Field(strict=True, ge=0, le=MAX_REPLICAS)]


def _read_count(value: object) -> int:
    count = parse_whole(value)
    if not 0 <= count <= MAX_REPLICAS:
        raise ValueError(f"{show(value)} is not from 0 to {MAX_REPLICAS:,}")
    return count


def read_replicas(value: object) -> object:
    """`3`, or `0..8`."""
    replica_range = read_range(value, _read_count, "0..8")
    if isinstance(replica_range, dict) and "max" in replica_range and replica_range["max"] is None:
        raise ValueError(f"{show(value)} has no upper end; write one, such as `0..8`")
    return replica_range


Replicas = Annotated[
    ReplicaRange,
    ShortForms(
        read_replicas,
        (
            {"type": "integer", "minimum": 0, "maximum": MAX_REPLICAS},
            text_schema(r"[0-9]+(?:\.\.[0-9]+)?", "0..8", "3"),
        ),
    ),
]

PortNumber = Annotated[int, Field(strict=True, ge=1, le=65535)]
Port = Annotated[int | str, OrName("socket", PortNumber, ("socket",))]
Pause = Annotated[
    float, Field(strict=True, ge=0.1, le=DAY_S, allow_inf_nan=False), seconds_between(0.1, DAY_S)
]
Hedge = Annotated[
    float, Field(strict=True, ge=0.001, le=DAY_S, allow_inf_nan=False), seconds_between(0.001, DAY_S)
]
HttpPath = Annotated[str, Field(strict=True, max_length=1000, pattern=HTTP_PATH_PATTERN)]


class ReadinessSpec(BaseModel):
    """A replica gets requests once `path` was answered well, and no longer when it is not.

    Well is any status below 400.
    """

    model_config = FROZEN

    path: HttpPath = "/"
    interval: Pause = Field(default=1.0, description="Time from one check to the next.")
    timeout: Pause = Field(default=2.0, description="A check without an answer in this time has failed.")
    failures: Annotated[int, Field(strict=True, ge=1, le=1000)] = Field(
        default=3,
        description="After this many failed checks in a row a replica gets no requests until it answers"
        " again.",
    )
    dead_after: Pause = Field(
        default=60.0, description="A replica that was ready and has not been for this long is replaced."
    )
    within: Pause = Field(
        default=600.0, description="A replica that is not ready this long after its start is replaced."
    )


def _read_readiness(value: object) -> object:
    return {"path": value} if isinstance(value, str) else value


Readiness = Annotated[ReadinessSpec, ShortForms(_read_readiness, (text_schema("/[!-~]*", "/health"),))]


class ScaleSpec(BaseModel):
    """How many replicas are needed: one for each `value` of the `target` measure."""

    model_config = FROZEN

    target: Target = Field(
        default="concurrency",
        description="`concurrency`: requests in replicas and waiting; `rps`: requests a second; "
        "`queue`: waiting requests; `tokens`: tokens a second.",
    )
    value: Annotated[float, Field(strict=True, gt=0, le=1e9, allow_inf_nan=False)] = Field(
        default=8.0, description="The amount of the target for one replica."
    )
    window: Pause = Field(
        default=6.0, description="More replicas start by the mean over this time; for `queue`, at once."
    )
    cooldown: Pause = Field(
        default=60.0,
        description="Replicas stop by the maximum over this time, and over at least four cold starts.",
    )
    to_zero_after: Pause = Field(
        default=300.0,
        description="The last replica stops after this time without a request, if `replicas` allow 0.",
    )
    sleep_after: Pause | None = Field(
        default=None,
        description="The last replica sleeps in its place after this time without a request, until one "
        "comes.",
    )


Ratio = Annotated[float, Field(strict=True, gt=0, le=1000, allow_inf_nan=False)]


class RollbackSpec(BaseModel):
    """When a release is rolled back, measured beside the release before it."""

    model_config = FROZEN

    error_rate: Annotated[float, Field(strict=True, ge=0, le=1)] = Field(
        default=0.05,
        description="Roll back if a larger part of its requests fails, and a larger part than of the "
        "old release's.",
    )
    latency: Ratio = Field(
        default=3.0,
        description="Roll back if its 95th percentile to the first byte is this many times the old "
        "release's.",
    )
    requests: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] = Field(
        default=20, description="Fewer requests than this decide nothing."
    )


def _growing(steps: tuple[float, ...]) -> tuple[float, ...]:
    if any(step >= after for step, after in pairwise(steps)):
        steps_text = show(", ".join(f"{step:g}" for step in steps))
        raise ValueError(f"{steps_text} does not grow; write percentages such as `[5, 25, 50]`")
    return steps


class RolloutSpec(BaseModel):
    """How a new release replaces the old one."""

    model_config = FROZEN

    strategy: Strategy = Field(
        default="rolling",
        description="`rolling`: one replica after the other; `canary`: first a part of the requests.",
    )
    steps: Annotated[
        tuple[Annotated[float, Field(strict=True, gt=0, lt=100)], ...],
        Field(min_length=1, max_length=20),
        AfterValidator(_growing),
    ] = Field(default=(5.0, 25.0, 50.0), description="`canary`: percentages of requests for the new release.")
    bake: Pause = Field(default=60.0, description="`canary`: how long each step is watched.")
    max_unavailable: Annotated[int, Field(strict=True, ge=0, le=MAX_REPLICAS)] = Field(
        default=1,
        description="Replicas that may be missing during a rollout if there is no room for one more, "
        "never all.",
    )
    rollback_on: RollbackSpec = RollbackSpec.model_construct()


def _read_rollout(value: object) -> object:
    return {"strategy": value} if isinstance(value, str) else value


Rollout = Annotated[RolloutSpec, ShortForms(_read_rollout, ({"enum": ["rolling", "canary"]},))]


class LimitsSpec(BaseModel):
    """Limits for one caller, or for one project's callers together."""

    model_config = FROZEN

    rps: Annotated[float, Field(strict=True, gt=0, le=1e9, allow_inf_nan=False)] | None = None
    concurrency: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] | None = None
    per: LimitScope = "token"


def _read_hosts(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _each_once(hosts: tuple[str, ...]) -> tuple[str, ...]:
    twice = sorted({host for host in hosts if hosts.count(host) > 1})
    if twice:
        raise ValueError(f"has {show(twice[0])} twice")
    return hosts


Hosts = Annotated[
    tuple[Annotated[str, Field(strict=True, max_length=253, pattern=HOST_PATTERN)], ...],
    Field(max_length=32),
    AfterValidator(_each_once),
    ShortForms(_read_hosts, ({"type": "string"},)),
]


Origins = Annotated[
    tuple[Annotated[str, Field(strict=True, max_length=300, pattern=ORIGIN_PATTERN)], ...],
    Field(max_length=32),
    AfterValidator(_each_once),
    ShortForms(_read_hosts, ({"type": "string"},)),
]
Affinity = Annotated[
    str, Field(strict=True, max_length=100, pattern=AFFINITY_PATTERN), AfterValidator(writable)
]


def _read_job(value: object) -> object:
    is_number = isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**63
    return str(value) if is_number else value


class ModelSpec(BaseModel):
    """A checkpoint of a job of the same project, as it is when the service is served.

    Each replica gets it, read-only, as SHOAL_MODEL_DIR.
    """

    model_config = FROZEN

    job: Annotated[
        str,
        Field(strict=True, min_length=1, max_length=210, pattern=JOB_PATTERN),
        ShortForms(_read_job, ({"type": "integer", "minimum": 1, "maximum": 2**63 - 1},)),
    ] = Field(description="By number, `project/number`, id, or name (the newest of that name).")
    step: Annotated[int, Field(strict=True, ge=0, lt=10**12)] | None = Field(
        default=None, description="A step of the job; unset: the newest complete checkpoint."
    )
    save: Annotated[str, Field(strict=True, max_length=60, pattern=SAVE_PATTERN)] | None = Field(
        default=None, description="Its folder; filled in and kept with the release."
    )


Model = Annotated[ModelSpec | str, OrName(r"\S.{0,198}\S|\S", ModelSpec, ("chat@7",))]
SERVICE_FIELD_MODELS: Mapping[tuple[str, ...], type[BaseModel]] = {
    ("model",): ModelSpec,
    ("replicas",): ReplicaRange,
    ("readiness",): ReadinessSpec,
    ("scale",): ScaleSpec,
    ("rollout",): RolloutSpec,
    ("rollout", "rollback_on"): RollbackSpec,
    ("limits",): LimitsSpec,
}
"""The model of each part of a service, by its path."""
