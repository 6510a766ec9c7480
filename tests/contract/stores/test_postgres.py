"""A real PostgreSQL, held to the store's contract; and what only a server can do: go away."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator

import anyio
import psycopg
import pytest

from shoal.clock import SystemClock
from shoal.errors import StateError, StoreUnavailable
from shoal.store import Store, Tx, open_store
from tests.contract.stores.event_log_contract import EventLogContract, Tamper
from tests.contract.stores.metrics_contract import MetricsContract
from tests.contract.stores.store_contract import StoreContract
from tests.support.host.postgres import PostgresServer, postgres
from tests.support.store_records import submit

__all__ = ["postgres"]


@pytest.fixture(scope="module")
def migrated(postgres: PostgresServer) -> str:
    """One with the whole schema, which takes a quarter of a second to make, and its copy far less."""
    name = postgres.new_database()

    async def migrate() -> None:
        await open_store(postgres.url(name), clock=SystemClock()).close()

    anyio.run(migrate)
    return name


@pytest.fixture
def database(postgres: PostgresServer, migrated: str) -> str:
    """Dropped with its server: each by itself costs more than its making."""
    return postgres.new_database(like=migrated)


@pytest.fixture
async def store(postgres: PostgresServer, database: str) -> AsyncIterator[Store]:
    store = open_store(postgres.url(database), clock=SystemClock())
    yield store
    await store.close()


@pytest.fixture
def tamper(postgres: PostgresServer, database: str) -> Tamper:
    def run(sql: str) -> None:
        with psycopg.connect(postgres.dsn(database)) as connection:
            connection.execute("ALTER TABLE events DISABLE TRIGGER USER")
            connection.execute(sql.encode())

    return run


def _end_sessions(postgres: PostgresServer, database: str) -> None:
    with psycopg.connect(postgres.dsn(database), autocommit=True) as other:
        other.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


class TestPostgresStore(StoreContract):
    __test__ = True


class TestPostgresEventLog(EventLogContract):
    __test__ = True


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT])
async def test_store_goes_on_after_the_server_was_restarted(
    postgres: PostgresServer, store: Store, how: signal.Signals
) -> None:
    assert await store.write(lambda tx: submit(tx, 1)) == 1
    postgres.stop(how)
    try:
        with pytest.raises(StoreUnavailable):
            await store.write(lambda tx: submit(tx, 2))
        with pytest.raises(StoreUnavailable):
            await store.read(lambda tx: tx.jobs.count_open("vision"))
    finally:
        postgres.start()
    assert await store.read(lambda tx: tx.jobs.count_open("vision")) == 1
    assert await store.write(lambda tx: submit(tx, 2)) == 2
    assert await store.read(lambda tx: tx.events.verify()) is None


async def test_restart_between_two_writes_is_not_noticed(postgres: PostgresServer, store: Store) -> None:
    await store.write(lambda tx: submit(tx, 1))
    await store.read(lambda tx: tx.jobs.count_open("vision"))
    postgres.stop()
    postgres.start()
    assert await store.write(lambda tx: submit(tx, 2)) == 2
    assert await store.read(lambda tx: tx.jobs.count_open("vision")) == 2


async def test_connection_killed_inside_a_change_is_not_acknowledged(
    postgres: PostgresServer, database: str, store: Store
) -> None:
    def change(tx: Tx) -> None:
        submit(tx, 1)
        _end_sessions(postgres, database)

    with pytest.raises(StoreUnavailable):
        await store.write(change)
    assert await store.write(lambda tx: submit(tx, 1)) == 1


async def test_second_control_plane_is_refused_and_told_who_is_there(
    postgres: PostgresServer, database: str, store: Store
) -> None:
    with pytest.raises(StateError, match=f"another control plane .*pid {os.getpid()} on "):
        open_store(postgres.url(database), clock=SystemClock())
    assert await store.write(lambda tx: submit(tx, 1)) == 1


async def test_database_is_free_once_its_control_plane_has_closed_it(
    postgres: PostgresServer, database: str, store: Store
) -> None:
    await store.close()
    other = open_store(postgres.url(database), clock=SystemClock())
    assert await other.write(lambda tx: submit(tx, 1)) == 1
    await other.close()


async def test_store_whose_session_was_lost_writes_nothing_while_another_owns_the_database(
    postgres: PostgresServer, database: str, store: Store
) -> None:
    await store.write(lambda tx: submit(tx, 1))
    _end_sessions(postgres, database)
    other = open_store(postgres.url(database), clock=SystemClock())
    with pytest.raises(StoreUnavailable, match="another control plane"):
        await store.write(lambda tx: submit(tx, 2))
    assert await other.read(lambda tx: tx.jobs.count_open("vision")) == 1
    await other.close()
    assert await store.write(lambda tx: submit(tx, 2)) == 2


async def test_two_databases_on_one_server_do_not_keep_each_other_out(
    postgres: PostgresServer, store: Store
) -> None:
    name = postgres.new_database()
    neighbour = open_store(postgres.url(name), clock=SystemClock())
    assert await neighbour.write(lambda tx: submit(tx, 1)) == 1
    await neighbour.close()


async def test_truncate_of_the_event_log_is_refused(
    postgres: PostgresServer, database: str, store: Store
) -> None:
    await store.write(lambda tx: submit(tx, 1))
    with (
        psycopg.connect(postgres.dsn(database)) as connection,
        pytest.raises(psycopg.Error, match="append-only"),
    ):
        connection.execute("TRUNCATE events")


def test_server_that_is_not_there_is_named_as_such(postgres: PostgresServer) -> None:
    with pytest.raises(StoreUnavailable, match="does not exist"):
        open_store(postgres.url("nowhere"), clock=SystemClock())


def test_newer_database_is_refused(postgres: PostgresServer) -> None:
    database = postgres.new_database()
    with psycopg.connect(postgres.dsn(database)) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num varchar(32) PRIMARY KEY)")
        connection.execute("INSERT INTO alembic_version VALUES ('9999')")
    with pytest.raises(StateError, match="newer Shoal"):
        open_store(postgres.url(database), clock=SystemClock())


class TestPostgresMetrics(MetricsContract):
    __test__ = True
