"""Migrations and tables agree; queries that must be fast use the indexes made for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, event, inspect, make_url

from shoal.store import EventFilter, JobFilter, Tx, migrations
from shoal.store.database import Database
from shoal.store.migrations import migrate
from shoal.store.postgres import PostgresDatabase
from shoal.store.schema import metadata
from shoal.store.sqlite import SqliteDatabase
from tests.support.host.postgres import PostgresServer, postgres
from tests.support.store_records import a_job, a_window, an_attempt, submit

__all__ = ["postgres"]


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    if request.param == "sqlite":
        file = SqliteDatabase(tmp_path / "shoal.db")
        yield file
        file.close()
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    name = server.new_database()
    yield PostgresDatabase(make_url(server.url(name)))
    server.drop_database(name)


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Connection]:
    database = SqliteDatabase(tmp_path / "shoal.db")
    with database.connect_writer() as connection:
        database.begin_write(connection)
        migrate(connection)
        yield connection
        connection.rollback()
    database.close()


def test_migrations_make_exactly_the_tables_that_the_code_expects(database: Database) -> None:
    with database.connect_writer() as connection:
        database.begin_write(connection)
        migrate(connection)
        made = _described(connection)
        connection.rollback()
        database.begin_write(connection)
        metadata.create_all(connection)
        assert made == _described(connection)
        connection.rollback()


def test_database_of_the_first_version_keeps_its_records_and_takes_windows(database: Database) -> None:
    with database.connect_writer() as connection:
        database.begin_write(connection)
        config = Config()
        config.set_main_option("script_location", str(Path(migrations.__file__).parent))
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        tables = {name for name in metadata.tables if inspect(connection).has_table(name)}
        later = {
            "windows",
            "metric_series",
            "metric_points",
            "services",
            "releases",
            "replicas",
            "left_behind",
            "array_work",
            "daily_counts",
        }
        assert metadata.tables.keys() - tables == later
        Tx(connection).meta.set("kept", "yes")
        migrate(connection)
        tx = Tx(connection)
        tx.windows.add(a_window())
        assert (tx.meta.get("kept"), tx.windows.all()) == ("yes", [a_window()])
        connection.rollback()


def test_migrating_twice_changes_nothing(database: Database) -> None:
    with database.connect_writer() as connection:
        for _ in range(2):
            database.begin_write(connection)
            migrate(connection)
            connection.commit()


def test_migration_that_fails_half_way_leaves_nothing(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with database.connect_writer() as connection:
        database.begin_write(connection)
        connection.exec_driver_sql("CREATE TABLE tokens (in_the_way int)")
        connection.commit()
        database.begin_write(connection)
        with pytest.raises(Exception, match="tokens"):
            migrate(connection)
        connection.rollback()
        database.begin_write(connection)
        with pytest.raises(Exception, match="jobs"):
            connection.exec_driver_sql("SELECT * FROM jobs")
        connection.rollback()


DESCRIPTIONS = {
    "sqlite": ["SELECT name, sql FROM sqlite_master WHERE type IN ('table', 'index')"],
    "postgresql": [
        "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'",
        """SELECT table_name, column_name, data_type, is_nullable, collation_name, column_default
           FROM information_schema.columns WHERE table_schema = 'public'""",
    ],
}


def _described(connection: Connection) -> list[str]:
    """Every table, column and index, in the database's own words."""
    rows = [row for sql in DESCRIPTIONS[connection.dialect.name] for row in connection.exec_driver_sql(sql)]
    # A column that was added later stands on the line of the column before.
    return sorted(" ".join(" | ".join(map(str, row)).split()) for row in rows if "alembic" not in str(row))


class Statements:
    """Stands before the driver and records the statements sent to the database."""

    def __init__(self, tx: Tx, connection: Connection) -> None:
        self.sent: list[tuple[str, Any]] = []
        self._driver = tx.session._driver
        tx.session._driver = self
        event.listen(connection, "before_cursor_execute", self._note)

    def execute(self, statement: str, parameters: Any) -> Any:
        self.sent.append((statement, parameters))
        return self._driver.execute(statement, parameters)

    def cursor(self) -> Statements:
        return self

    def executemany(self, statement: str, rows: list[Any]) -> None:
        self.sent.append((statement, rows[0]))
        self._driver.executemany(statement, rows)

    def _note(self, _: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        self.sent.append((statement, parameters))


def test_submit_takes_eight_statements(sqlite: Connection) -> None:
    tx = Tx(sqlite)
    submit(tx, 1)
    statements = Statements(tx, sqlite)
    submit(tx, 2)
    assert len(statements.sent) == 8


def test_array_takes_as_many_statements_as_one_job(sqlite: Connection) -> None:
    tx = Tx(sqlite)
    statements = Statements(tx, sqlite)
    first = tx.submissions.admit("vision", 500).first
    jobs = [a_job(first + number) for number in range(500)]
    tx.submissions.add([(job, an_attempt(job)) for job in jobs])
    assert len(statements.sent) == 4


QUERIES: dict[str, Callable[[Tx], object]] = {
    "all": lambda tx: tx.jobs.page(JobFilter(), (1.0, "x"), 50),
    "project": lambda tx: tx.jobs.page(JobFilter(projects=("a", "b")), (1.0, "x"), 50),
    "status": lambda tx: tx.jobs.page(JobFilter(statuses=("queued", "failed")), None, 50),
    "project and status": lambda tx: tx.jobs.page(
        JobFilter(projects=("a",), statuses=("queued", "failed")), (1.0, "x"), 50
    ),
    "name": lambda tx: tx.jobs.page(JobFilter(name="a", projects=("a",)), (1.0, "x"), 50),
    "owner": lambda tx: tx.jobs.page(JobFilter(owner="a", statuses=("failed",)), None, 50),
    "array": lambda tx: tx.jobs.page(JobFilter(array_id="a", name="b"), (1.0, "x"), 50),
    "newest named": lambda tx: tx.jobs.newest_named("a", "b"),
    "count open": lambda tx: tx.jobs.count_open("a"),
    "queued": lambda tx: tx.attempts.queued(100),
    "changed": lambda tx: tx.jobs.changed_since(5),
    "newest attempt": lambda tx: tx.attempts.newest("a"),
    "events after": lambda tx: tx.events.page(5),
    "events of a job": lambda tx: tx.events.page(5, EventFilter(job_id="a")),
    "events by others": lambda tx: tx.events.page(5, EventFilter(without_ours=True)),
    "drills": lambda tx: tx.events.latest(5, EventFilter(kinds_prefix="drill.")),
    "drills of projects": lambda tx: tx.events.latest(
        5, EventFilter(kinds_prefix="drill.", projects=("a", "b"))
    ),
    "ends": lambda tx: tx.events.page(5, EventFilter(kinds_prefix="attempt.ended")),
    "look": lambda tx: tx.events.scan(5, EventFilter(projects=("a", "b"), service="chat"), 50),
    "look at a job": lambda tx: tx.events.scan(5, EventFilter(job_id="a", projects=("a",), node="n"), 50),
    "look back at a project": lambda tx: tx.events.scan_back(9, EventFilter(projects=("a",), service="c"), 5),
    "audit tail": lambda tx: tx.events.latest(5, EventFilter(without_ours=True)),
}


@pytest.mark.parametrize("name", QUERIES)
def test_query_walks_an_index_and_sorts_nothing(sqlite: Connection, name: str) -> None:
    tx = Tx(sqlite)
    submit(tx, 1)
    statements = Statements(tx, sqlite)
    QUERIES[name](tx)
    assert statements.sent
    for statement, parameters in list(statements.sent):
        plan = [row[3] for row in sqlite.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)]
        for step in plan:
            assert not step.startswith("SCAN") or "USING" in step, (statement, plan)
            assert "TEMP B-TREE" not in step, (statement, plan)


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("events by others", "events_by_others"),
        ("drills", "events_of_drills"),
        ("drills of projects", "events_of_drills"),
        ("ends", "events_of_ends"),
    ],
)
def test_few_rows_of_many_have_an_index_of_their_own(sqlite: Connection, name: str, index: str) -> None:
    """SQLite sees that the index fits only if the condition is written out."""
    tx = Tx(sqlite)
    statements = Statements(tx, sqlite)
    QUERIES[name](tx)
    [(statement, parameters)] = list(statements.sent)
    plan = sqlite.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
    assert index in str(plan)
