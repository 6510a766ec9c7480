"""A real PostgreSQL, held to the store's contract; and what only a server can do: go away."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from functools import partial

import anyio
import psycopg
import pytest

from shoal.clock import SystemClock
from shoal.errors import StateError, StoreUnavailable
from shoal.store import Store, Tx, open_store
from tests.contract.event_log_contract import EventLogContract, Tamper
from tests.contract.store_contract import StoreContract
from tests.support.postgres import PostgresServer, postgres
from tests.support.store_records import submit

__all__ = ["postgres"]


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[str]:
    name = postgres.new_database()
    yield name
    postgres.drop_database(name)


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
        with psycopg.connect(postgres.dsn(database), autocommit=True) as other:
            other.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )

    with pytest.raises(StoreUnavailable):
        await store.write(change)
    assert await store.write(lambda tx: submit(tx, 1)) == 1


async def test_two_control_planes_append_to_one_unbroken_chain(
    postgres: PostgresServer, database: str, store: Store
) -> None:
    other = open_store(postgres.url(database), clock=SystemClock())

    async def append(to: Store, numbers: range) -> None:
        for number in numbers:
            await to.write(partial(submit, number=number))

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(append, store, range(10))
            group.start_soon(append, other, range(10, 20))
    finally:
        await other.close()
    assert await store.read(lambda tx: tx.events.head().seq) == 40
    assert await store.read(lambda tx: tx.events.verify()) is None


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


def test_newer_database_is_refused(postgres: PostgresServer, database: str) -> None:
    with psycopg.connect(postgres.dsn(database)) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num varchar(32) PRIMARY KEY)")
        connection.execute("INSERT INTO alembic_version VALUES ('9999')")
    with pytest.raises(StateError, match="newer Shoal"):
        open_store(postgres.url(database), clock=SystemClock())
