"""The first tables, and the triggers that keep the event log append-only."""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Column, Double, Integer, LargeBinary, Text, text

revision = "0001"
down_revision = None

SERIAL = BigInteger().with_variant(Integer, "sqlite")
WORDS = Text().with_variant(Text(collation="C"), "postgresql")

OF_ARRAY = ("array_id", "submitted_at", "job_id", "project", "status", "owner", "name")
PARTIAL_INDEXES = (
    ("jobs_by_array", "jobs", OF_ARRAY, "array_id IS NOT NULL"),
    ("events_by_project", "events", ("project", "seq"), "project IS NOT NULL"),
    ("events_by_job", "events", ("job_id", "seq"), "job_id IS NOT NULL"),
    ("events_by_node", "events", ("node", "seq"), "node IS NOT NULL"),
    ("events_by_others", "events", ("seq",), "actor <> 'shoal'"),
)
INDEXES = (
    ("jobs_by_number", "jobs", ("project", "number"), True),
    ("jobs_by_name", "jobs", ("project", "name", "number"), False),
    ("jobs_by_age", "jobs", ("submitted_at", "job_id"), False),
    ("jobs_by_project", "jobs", ("project", "submitted_at", "job_id"), False),
    ("jobs_by_status", "jobs", ("status", "submitted_at", "job_id"), False),
    ("jobs_by_project_status", "jobs", ("project", "status", "submitted_at", "job_id"), False),
    ("jobs_named", "jobs", ("name", "submitted_at", "job_id", "project", "status", "owner"), False),
    ("jobs_by_owner", "jobs", ("owner", "submitted_at", "job_id", "project", "status"), False),
    ("jobs_by_urgency", "jobs", ("status", text("priority DESC"), "submitted_at", "job_id"), False),
    ("attempts_by_job", "attempts", ("job_id", "epoch"), True),
    ("attempts_by_state", "attempts", ("state", "attempt_id"), False),
    ("idempotency_keys_by_age", "idempotency_keys", ("at",), False),
    ("users_by_name", "users", ("name",), True),
    ("projects_by_uid", "projects", ("uid",), True),
    ("memberships_by_project", "memberships", ("project",), False),
    ("tokens_by_user", "tokens", ("user_id",), False),
)

SQLITE_TRIGGERS = (
    """CREATE TRIGGER events_keep BEFORE UPDATE ON events
       BEGIN SELECT RAISE(ABORT, 'the event log is append-only'); END""",
    """CREATE TRIGGER events_keep_all BEFORE DELETE ON events
       BEGIN SELECT RAISE(ABORT, 'the event log is append-only'); END""",
    """CREATE TRIGGER events_at_end BEFORE INSERT ON events
       WHEN EXISTS (SELECT 1 FROM events WHERE seq >= NEW.seq)
       BEGIN SELECT RAISE(ABORT, 'the event log is append-only'); END""",
)
POSTGRES_TRIGGERS = (
    """CREATE FUNCTION shoal_refuse_event_change() RETURNS trigger LANGUAGE plpgsql AS $$
       BEGIN
         RAISE EXCEPTION 'the event log is append-only' USING ERRCODE = 'restrict_violation';
       END $$""",
    """CREATE FUNCTION shoal_refuse_event_between() RETURNS trigger LANGUAGE plpgsql AS $$
       BEGIN
         IF EXISTS (SELECT 1 FROM events WHERE seq >= NEW.seq) THEN
           RAISE EXCEPTION 'the event log is append-only' USING ERRCODE = 'restrict_violation';
         END IF;
         RETURN NEW;
       END $$""",
    """CREATE TRIGGER events_keep BEFORE UPDATE OR DELETE ON events
       FOR EACH ROW EXECUTE FUNCTION shoal_refuse_event_change()""",
    """CREATE TRIGGER events_keep_all BEFORE TRUNCATE ON events
       FOR EACH STATEMENT EXECUTE FUNCTION shoal_refuse_event_change()""",
    """CREATE TRIGGER events_at_end BEFORE INSERT ON events
       FOR EACH ROW EXECUTE FUNCTION shoal_refuse_event_between()""",
)


def upgrade() -> None:
    _create_work()
    _create_events()
    _create_people()
    _create_rest()
    for name, table, columns, is_unique in INDEXES:
        op.create_index(name, table, list(columns), unique=is_unique)
    for name, table, parts, where in PARTIAL_INDEXES:
        op.create_index(name, table, list(parts), sqlite_where=text(where), postgresql_where=text(where))
    is_sqlite = op.get_context().dialect.name == "sqlite"
    for trigger in SQLITE_TRIGGERS if is_sqlite else POSTGRES_TRIGGERS:
        op.get_bind().exec_driver_sql(trigger)


def _create_work() -> None:
    op.create_table(
        "jobs",
        Column("job_id", WORDS, primary_key=True),
        Column("project", WORDS, nullable=False),
        Column("number", BigInteger, nullable=False),
        Column("name", WORDS, nullable=False),
        Column("owner", WORDS, nullable=False),
        Column("priority", BigInteger, nullable=False),
        Column("submitted_at", Double, nullable=False),
        Column("array_id", WORDS),
        Column("outcome", WORDS),
        Column("status", WORDS, nullable=False),
        Column("newest_attempt_id", WORDS),
        Column("newest_epoch", BigInteger, nullable=False),
        Column("version", BigInteger, nullable=False),
        Column("body", WORDS, nullable=False),
    )
    op.create_table(
        "project_counters",
        Column("project", WORDS, primary_key=True),
        Column("next_number", BigInteger, nullable=False),
        Column("open_jobs", BigInteger, nullable=False),
    )
    op.create_table(
        "attempts",
        Column("attempt_id", WORDS, primary_key=True),
        Column("job_id", WORDS, nullable=False),
        Column("epoch", BigInteger, nullable=False),
        Column("state", WORDS, nullable=False),
        Column("version", BigInteger, nullable=False),
        Column("body", WORDS, nullable=False),
    )
    op.create_table(
        "nodes",
        Column("name", WORDS, primary_key=True),
        Column("version", BigInteger, nullable=False),
        Column("body", WORDS, nullable=False),
    )


def _create_events() -> None:
    op.create_table(
        "events",
        Column("seq", SERIAL, primary_key=True, autoincrement=False),
        Column("hash", WORDS, nullable=False),
        Column("at", Double, nullable=False),
        Column("kind", WORDS, nullable=False),
        Column("actor", WORDS, nullable=False),
        Column("project", WORDS),
        Column("job_id", WORDS),
        Column("attempt_id", WORDS),
        Column("node", WORDS),
        Column("data", WORDS, nullable=False),
        Column("request_id", WORDS),
    )


def _create_people() -> None:
    op.create_table(
        "users",
        Column("user_id", WORDS, primary_key=True),
        Column("name", WORDS, nullable=False),
        Column("body", WORDS, nullable=False),
    )
    op.create_table(
        "projects",
        Column("name", WORDS, primary_key=True),
        Column("uid", BigInteger, nullable=False),
        Column("body", WORDS, nullable=False),
    )
    op.create_table(
        "memberships",
        Column("user_id", WORDS, primary_key=True),
        Column("project", WORDS, primary_key=True),
        Column("role", WORDS, nullable=False),
    )
    op.create_table(
        "tokens",
        Column("token_id", WORDS, primary_key=True),
        Column("user_id", WORDS, nullable=False),
        Column("body", WORDS, nullable=False),
    )


def _create_rest() -> None:
    op.create_table(
        "idempotency_keys",
        Column("actor", WORDS, primary_key=True),
        Column("key", WORDS, primary_key=True),
        Column("fingerprint", WORDS, nullable=False),
        Column("answer", LargeBinary, nullable=False),
        Column("at", Double, nullable=False),
    )
    op.create_table(
        "secrets",
        Column("job_id", WORDS, primary_key=True),
        Column("sealed", LargeBinary, nullable=False),
    )
    op.create_table(
        "meta",
        Column("key", WORDS, primary_key=True),
        Column("value", WORDS, nullable=False),
    )
