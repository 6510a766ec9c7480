"""The tables as the newest migration leaves them. A test compares the two on both databases.

`body` holds the whole record. The other columns repeat the fields that are searched, ordered or guarded.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    text,
)

metadata = MetaData()

# INTEGER makes SQLite use the column as its row id.
Serial = BigInteger().with_variant(Integer, "sqlite")
# Compared byte by byte on both databases: a page must continue where the last one stopped, whatever the
# locale.
SortedText = Text().with_variant(Text(collation="C"), "postgresql")

jobs = Table(
    "jobs",
    metadata,
    Column("job_id", SortedText, primary_key=True),
    Column("project", SortedText, nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("name", SortedText, nullable=False),
    Column("owner", SortedText, nullable=False),
    Column("priority", BigInteger, nullable=False),
    Column("submitted_at", Double, nullable=False),
    Column("array_id", SortedText),
    Column("outcome", SortedText),
    # The newest attempt's state while the job is open, else its outcome.
    Column("status", SortedText, nullable=False),
    Column("newest_attempt_id", SortedText),
    Column("newest_epoch", BigInteger, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("body", SortedText, nullable=False),
    Index("jobs_by_number", "project", "number", unique=True),
    Index("jobs_by_name", "project", "name", "number"),
    Index("jobs_by_age", "submitted_at", "job_id"),
    Index("jobs_by_project", "project", "submitted_at", "job_id"),
    Index("jobs_by_status", "status", "submitted_at", "job_id"),
    Index("jobs_by_project_status", "project", "status", "submitted_at", "job_id"),
    # These indexes carry the other columns that a filter may test, so a walk along them never visits the
    # table.
    Index("jobs_named", "name", "submitted_at", "job_id", "project", "status", "owner"),
    Index("jobs_by_owner", "owner", "submitted_at", "job_id", "project", "status"),
    Index(
        "jobs_by_array",
        "array_id",
        "submitted_at",
        "job_id",
        "project",
        "status",
        "owner",
        "name",
        sqlite_where=text("array_id IS NOT NULL"),
        postgresql_where=text("array_id IS NOT NULL"),
    ),
    Index(
        "jobs_in_array",
        "array_id",
        "number",
        sqlite_where=text("array_id IS NOT NULL"),
        postgresql_where=text("array_id IS NOT NULL"),
    ),
    Index("jobs_by_urgency", "status", text("priority DESC"), "submitted_at", "job_id"),
)

project_counters = Table(
    "project_counters",
    metadata,
    Column("project", SortedText, primary_key=True),
    Column("next_number", BigInteger, nullable=False),
    Column("open_jobs", BigInteger, nullable=False),
)

array_work = Table(
    "array_work",
    metadata,
    Column("array_id", SortedText, primary_key=True),
    Column("verb", SortedText, primary_key=True),
    Column("actor", SortedText, nullable=False),
    Column("last_number", BigInteger, nullable=False, server_default=text("0")),
)

daily_counts = Table(
    "daily_counts",
    metadata,
    Column("subject", SortedText, primary_key=True),
    Column("day", BigInteger, nullable=False),
    Column("count", BigInteger, nullable=False),
)

attempts = Table(
    "attempts",
    metadata,
    Column("attempt_id", SortedText, primary_key=True),
    Column("job_id", SortedText, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("state", SortedText, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("body", SortedText, nullable=False),
    Index("attempts_by_job", "job_id", "epoch", unique=True),
    Index("attempts_by_state", "state", "attempt_id"),
)

nodes = Table(
    "nodes",
    metadata,
    Column("name", SortedText, primary_key=True),
    Column("version", BigInteger, nullable=False),
    Column("body", SortedText, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("seq", Serial, primary_key=True, autoincrement=False),
    Column("hash", SortedText, nullable=False),
    Column("at", Double, nullable=False),
    Column("kind", SortedText, nullable=False),
    Column("actor", SortedText, nullable=False),
    Column("project", SortedText),
    Column("job_id", SortedText),
    Column("attempt_id", SortedText),
    Column("node", SortedText),
    Column("data", SortedText, nullable=False),
    Column("request_id", SortedText),
    Index(
        "events_by_project",
        "project",
        "seq",
        sqlite_where=text("project IS NOT NULL"),
        postgresql_where=text("project IS NOT NULL"),
    ),
    Index(
        "events_by_job",
        "job_id",
        "seq",
        sqlite_where=text("job_id IS NOT NULL"),
        postgresql_where=text("job_id IS NOT NULL"),
    ),
    Index(
        "events_by_node",
        "node",
        "seq",
        sqlite_where=text("node IS NOT NULL"),
        postgresql_where=text("node IS NOT NULL"),
    ),
    Index(
        "events_by_others",
        "seq",
        sqlite_where=text("actor <> 'shoal'"),
        postgresql_where=text("actor <> 'shoal'"),
    ),
    Index(
        "events_of_drills",
        "seq",
        sqlite_where=text("substr(kind, 1, 6) = 'drill.'"),
        postgresql_where=text("substr(kind, 1, 6) = 'drill.'"),
    ),
    Index(
        "events_of_ends",
        "seq",
        sqlite_where=text("kind = 'attempt.ended'"),
        postgresql_where=text("kind = 'attempt.ended'"),
    ),
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("actor", SortedText, primary_key=True),
    Column("key", SortedText, primary_key=True),
    Column("fingerprint", SortedText, nullable=False),
    Column("answer", LargeBinary, nullable=False),
    Column("at", Double, nullable=False),
    Index("idempotency_keys_by_age", "at"),
)

users = Table(
    "users",
    metadata,
    Column("user_id", SortedText, primary_key=True),
    Column("name", SortedText, nullable=False),
    Column("body", SortedText, nullable=False),
    Index("users_by_name", "name", unique=True),
)

projects = Table(
    "projects",
    metadata,
    Column("name", SortedText, primary_key=True),
    Column("uid", BigInteger, nullable=False),
    Column("body", SortedText, nullable=False),
    Index("projects_by_uid", "uid", unique=True),
)

memberships = Table(
    "memberships",
    metadata,
    Column("user_id", SortedText, primary_key=True),
    Column("project", SortedText, primary_key=True),
    Column("role", SortedText, nullable=False),
    Index("memberships_by_project", "project"),
)

tokens = Table(
    "tokens",
    metadata,
    Column("token_id", SortedText, primary_key=True),
    Column("user_id", SortedText, nullable=False),
    Column("body", SortedText, nullable=False),
    # The token it was made with.
    Column("parent", SortedText),
    # `project/service`, if the token opens only one service.
    Column("service", SortedText),
    Index("tokens_by_user", "user_id"),
    Index("tokens_by_parent", "parent"),
    Index("tokens_by_service", "service"),
)

secrets = Table(
    "secrets",
    metadata,
    Column("job_id", SortedText, primary_key=True),
    Column("sealed", LargeBinary, nullable=False),
)

left_behind = Table(
    "left_behind",
    metadata,
    Column("digest", SortedText, primary_key=True),
    Column("used_at", Double, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Index("left_behind_by_age", "used_at"),
)

windows = Table(
    "windows",
    metadata,
    Column("window_id", SortedText, primary_key=True),
    Column("from_at", Double, nullable=False),
    Column("until_at", Double, nullable=False),
    Column("body", SortedText, nullable=False),
)

metric_series = Table(
    "metric_series",
    metadata,
    Column("job_id", SortedText, primary_key=True),
    Column("name", SortedText, primary_key=True),
    # Empty for what ranks logged, because such a value belongs to the job and not to a node.
    Column("node", SortedText, primary_key=True),
    Column("axis", SortedText, primary_key=True),
    # The source of the values: the newest attempt that reported any, and its lowest rank.
    Column("epoch", BigInteger, nullable=False),
    Column("rank", BigInteger, nullable=False),
    # The length of the curve's stretches, and their number.
    Column("stride", BigInteger, nullable=False),
    Column("num_points", BigInteger, nullable=False),
    Column("heard_at", Double, nullable=False),
    # The `x` and value reported last. Without `x`, nothing was reported since these columns exist.
    Column("newest_x", BigInteger),
    Column("newest", Double),
)

metric_points = Table(
    "metric_points",
    metadata,
    Column("job_id", SortedText, primary_key=True),
    Column("name", SortedText, primary_key=True),
    Column("node", SortedText, primary_key=True),
    Column("axis", SortedText, primary_key=True),
    Column("stretch", BigInteger, primary_key=True),
    Column("x", BigInteger, nullable=False),
    # None: not a finite number.
    Column("last", Double),
    Column("low", Double),
    Column("high", Double),
)

services = Table(
    "services",
    metadata,
    Column("service_id", SortedText, primary_key=True),
    Column("project", SortedText, nullable=False),
    Column("name", SortedText, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("body", SortedText, nullable=False),
    Index("services_by_name", "project", "name", unique=True),
)

releases = Table(
    "releases",
    metadata,
    Column("service_id", SortedText, primary_key=True),
    Column("number", BigInteger, primary_key=True),
    Column("body", SortedText, nullable=False),
)

replicas = Table(
    "replicas",
    metadata,
    Column("job_id", SortedText, primary_key=True),
    Column("service_id", SortedText, nullable=False),
    Column("body", SortedText, nullable=False),
    Index("replicas_by_service", "service_id"),
)

meta = Table(
    "meta",
    metadata,
    Column("key", SortedText, primary_key=True),
    Column("value", SortedText, nullable=False),
)
