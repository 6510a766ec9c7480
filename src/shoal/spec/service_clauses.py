"""The smaller parts of a service: how many replicas, when one is ready, scaling, rollouts, limits."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field

from shoal.spec.clauses import JOB_PATTERN, seconds_between
from shoal.spec.human import Human, OrName, text
from shoal.spec.quantity import parse_whole
from shoal.spec.resources import FROZEN, Range, read_range
from shoal.spec.text import writable
from shoal.spec.wording import show

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
PerWhom = Literal["token", "project"]
Network = Literal["closed", "open", "private"]


class ReplicaRange(Range):
    """How many replicas: always `min`, up to `max` where `scale` finds them needed. Both ends are needed."""

    min: Annotated[int, Field(strict=True, ge=0, le=MAX_REPLICAS)]
    max: Annotated[int, Field(strict=True, ge=0, le=MAX_REPLICAS)]


def _read_count(value: object) -> int:
    count = parse_whole(value)
    if not 0 <= count <= MAX_REPLICAS:
        raise ValueError(f"{show(value)} is not from 0 to {MAX_REPLICAS:,}")
    return count


def read_replicas(value: object) -> object:
    """`3`, or `0..8`."""
    found = read_range(value, _read_count, "0..8")
    if isinstance(found, dict) and "max" in found and found["max"] is None:
        raise ValueError(f"{show(value)} has no upper end; write one, such as `0..8`")
    return found


Replicas = Annotated[
    ReplicaRange,
    Human(
        read_replicas,
        (
            {"type": "integer", "minimum": 0, "maximum": MAX_REPLICAS},
            text(r"[0-9]+(?:\.\.[0-9]+)?", "0..8", "3"),
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
    """A replica is given requests once `path` was answered well, and no longer when it is not.

    Well is any status below 400.
    """

    model_config = FROZEN

    path: HttpPath = "/"
    interval: Pause = Field(default=1.0, description="From one question to the next.")
    timeout: Pause = Field(default=2.0, description="An answer that takes longer is none.")
    failures: Annotated[int, Field(strict=True, ge=1, le=1000)] = Field(
        default=3, description="So many in a row, and it is given nothing more until it answers again."
    )
    dead_after: Pause = Field(default=60.0, description="One that was ready and is not so long is replaced.")
    within: Pause = Field(
        default=600.0, description="One that is not ready so long after its start is replaced."
    )


def _read_readiness(value: object) -> object:
    return {"path": value} if isinstance(value, str) else value


Readiness = Annotated[ReadinessSpec, Human(_read_readiness, (text("/[!-~]*", "/health"),))]


class ScaleSpec(BaseModel):
    """How many replicas are needed: what there is of `target`, for each `value` of it one."""

    model_config = FROZEN

    target: Target = Field(
        default="concurrency",
        description="Requests there and waiting; requests a second; those waiting alone; tokens a second.",
    )
    value: Annotated[float, Field(strict=True, gt=0, le=1e9, allow_inf_nan=False)] = Field(
        default=8.0, description="What one replica should have of it."
    )
    window: Pause = Field(default=6.0, description="More by the mean over so long; for a queue at once.")
    cooldown: Pause = Field(
        default=60.0, description="Fewer by the most over so long, and over four cold starts at least."
    )
    to_zero_after: Pause = Field(
        default=300.0,
        description="So long without a request, and the last one goes if `replicas` allow 0.",
    )
    sleep_after: Pause | None = Field(
        default=None,
        description="So long without a request, and the last one sleeps in its place until one comes.",
    )


Ratio = Annotated[float, Field(strict=True, gt=0, le=1000, allow_inf_nan=False)]


class RollbackSpec(BaseModel):
    """When a release is taken back, measured beside the one before it."""

    model_config = FROZEN

    error_rate: Annotated[float, Field(strict=True, ge=0, le=1)] = Field(
        default=0.05, description="More of its requests fail, and more than of the old one's."
    )
    latency: Ratio = Field(
        default=3.0, description="Its 95th percentile to the first byte is so many times the old one's."
    )
    requests: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] = Field(
        default=20, description="Fewer than so many say nothing."
    )


def _growing(steps: tuple[float, ...]) -> tuple[float, ...]:
    if any(one >= after for one, after in pairwise(steps)):
        told = show(", ".join(f"{one:g}" for one in steps))
        raise ValueError(f"{told} does not grow; write percentages such as `[5, 25, 50]`")
    return steps


class RolloutSpec(BaseModel):
    """How a new release takes the place of the old one."""

    model_config = FROZEN

    strategy: Strategy = Field(
        default="rolling", description="One replica after the other, or first a part of the requests."
    )
    steps: Annotated[
        tuple[Annotated[float, Field(strict=True, gt=0, lt=100)], ...],
        Field(min_length=1, max_length=20),
        AfterValidator(_growing),
    ] = Field(default=(5.0, 25.0, 50.0), description="`canary`: percentages of requests for the new release.")
    bake: Pause = Field(default=60.0, description="`canary`: how long each step is watched.")
    max_unavailable: Annotated[int, Field(strict=True, ge=0, le=MAX_REPLICAS)] = Field(
        default=1,
        description="Where there is no room for one more: replicas that may be missing meanwhile, never all.",
    )
    rollback_on: RollbackSpec = RollbackSpec.model_construct()


def _read_rollout(value: object) -> object:
    return {"strategy": value} if isinstance(value, str) else value


Rollout = Annotated[RolloutSpec, Human(_read_rollout, ({"enum": ["rolling", "canary"]},))]


class LimitsSpec(BaseModel):
    """What one caller, or one project's callers together, may have of the service."""

    model_config = FROZEN

    rps: Annotated[float, Field(strict=True, gt=0, le=1e9, allow_inf_nan=False)] | None = None
    concurrency: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] | None = None
    per: PerWhom = "token"


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
    Human(_read_hosts, ({"type": "string"},)),
]


Origins = Annotated[
    tuple[Annotated[str, Field(strict=True, max_length=300, pattern=ORIGIN_PATTERN)], ...],
    Field(max_length=32),
    AfterValidator(_each_once),
    Human(_read_hosts, ({"type": "string"},)),
]
Affinity = Annotated[
    str, Field(strict=True, max_length=100, pattern=AFFINITY_PATTERN), AfterValidator(writable)
]


def _read_job(value: object) -> object:
    is_number = isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**63
    return str(value) if is_number else value


class ModelSpec(BaseModel):
    """A checkpoint of a job of the same project, as it is when the service is served.

    Each replica finds it, read-only, as SHOAL_MODEL_DIR.
    """

    model_config = FROZEN

    job: Annotated[
        str,
        Field(strict=True, min_length=1, max_length=210, pattern=JOB_PATTERN),
        Human(_read_job, ({"type": "integer", "minimum": 1, "maximum": 2**63 - 1},)),
    ] = Field(description="By number, `project/number`, id, or name (the newest of that name).")
    step: Annotated[int, Field(strict=True, ge=0, lt=10**12)] | None = Field(
        default=None, description="Unset: the newest that is whole."
    )
    save: Annotated[str, Field(strict=True, max_length=60, pattern=SAVE_PATTERN)] | None = Field(
        default=None, description="Its folder; found and kept with the release."
    )


Model = Annotated[ModelSpec | str, OrName(r"\S.{0,198}\S|\S", ModelSpec, ("chat@7",))]
PARTS: Mapping[tuple[str, ...], type[BaseModel]] = {
    ("model",): ModelSpec,
    ("replicas",): ReplicaRange,
    ("readiness",): ReadinessSpec,
    ("scale",): ScaleSpec,
    ("rollout",): RolloutSpec,
    ("rollout", "rollback_on"): RollbackSpec,
    ("limits",): LimitsSpec,
}
"""Where in a service each of them stands."""
