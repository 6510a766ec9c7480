"""The query parameters of each list. Unknown fields are refused."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from shoal.api.requests import TEXT_PATTERN

Short = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=TEXT_PATTERN)]
CURSOR_PATTERN = r"^[A-Za-z0-9._:-]+$"
Cursor = Annotated[str, StringConstraints(min_length=1, max_length=8000, pattern=CURSOR_PATTERN)]
Status = Literal["queued", "starting", "running", "stopping", "succeeded", "failed", "cancelled"]
MAX_SEQ = 2**62


class Query(BaseModel):
    """Base of every query. Numbers may be text, because a query is text."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class NoQuery(Query):
    """No parameters."""


class WhyQuery(Query):
    """`predict` also asks when the job will start, and what would start it now."""

    predict: bool = False


class PageQuery(Query):
    limit: Annotated[int, Field(ge=1, le=500)] = 50
    cursor: Cursor | None = None


class JobQuery(PageQuery):
    """`ref` is `vision/17`, `17`, a job's id, a name or an array's id, and matches at most one job per
    project.

    A name whose newest job is in an array means the whole array. `predict` also asks when jobs will start.
    """

    project: Short | None = None
    status: Annotated[list[Status], Field(max_length=7)] = []
    name: Short | None = None
    owner: Short | None = None
    array: Short | None = None
    ref: Short | None = None
    predict: bool = False


class ServiceQuery(Query):
    """`name`: only services of that name, at most one per project."""

    project: Short | None = None
    name: Short | None = None


class TableQuery(Query):
    """The answer waits up to `wait_s` for a table newer than `after`."""

    after: Annotated[int, Field(ge=0, le=MAX_SEQ)] = 0
    wait_s: Annotated[float, Field(ge=0, le=30, allow_inf_nan=False)] = 0.0


class LogQuery(Query):
    """`attempt` is an epoch, the newest by default. `tail` and `cursor` exclude each other. `stacks`: of
    ranks that hung, instead of their output. A tail reads the last 64 MiB of the logs.
    """

    attempt: Annotated[int, Field(ge=1, le=MAX_SEQ)] | None = None
    rank: Annotated[int, Field(ge=0, le=10**9)] | None = None
    stacks: bool = False
    tail: Annotated[int, Field(ge=0, le=10_000)] | None = None
    cursor: Cursor | None = None
    limit: Annotated[int, Field(ge=1, le=5000)] = 1000


class MetricsQuery(Query):
    """`points` is the most for each curve: neighbours are merged, the extremes stay."""

    name: Annotated[list[Short], Field(max_length=100)] = []
    points: Annotated[int, Field(ge=1, le=512)] = 60


class CheckpointsQuery(Query):
    """`verify` also compares hashes, for some seconds, the newest first."""

    verify: bool = False


class EventQuery(Query):
    """`tail` selects the newest events, and excludes `after`. `service`: a name, with or
    without `project`.
    """

    after: Annotated[int, Field(ge=0, le=MAX_SEQ)] | None = None
    tail: Annotated[int, Field(ge=1, le=1000)] | None = None
    limit: Annotated[int, Field(ge=1, le=1000)] = 100
    project: Short | None = None
    job: Short | None = None
    service: Short | None = None
    node: Short | None = None
    kind: Short | None = None


class EventStreamQuery(Query):
    """Without `after` the stream begins now."""

    after: Annotated[int, Field(ge=0, le=MAX_SEQ)] | None = None
    project: Short | None = None
    job: Short | None = None
    service: Short | None = None
    node: Short | None = None
    kind: Short | None = None


class AuditQuery(Query):
    """As for events."""

    after: Annotated[int, Field(ge=0, le=MAX_SEQ)] | None = None
    tail: Annotated[int, Field(ge=1, le=1000)] | None = None
    limit: Annotated[int, Field(ge=1, le=1000)] = 100


class DrillQuery(Query):
    """The newest `limit`, of all jobs or of one."""

    job: Short | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 20


class ArchiveQuery(Query):
    """The project whose jobs will use the archive; by default the only project you may submit to."""

    project: Short | None = None


class ArchiveLookup(Query):
    project: Short | None = None


class RevokeQuery(Query):
    """`keep_children`: tokens made with this token stay, as if made with its parent."""

    keep_children: bool = False


class TokenQuery(Query):
    """`user` other than oneself needs an admin."""

    user: Short | None = None
