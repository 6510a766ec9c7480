"""From a URL to an open store whose tables are those of this version."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from shoal.clock import Clock
from shoal.store.database import Database, unavailable
from shoal.store.lead import take_lead
from shoal.store.migrations import migrate
from shoal.store.postgres import PostgresDatabase
from shoal.store.sqlite import SqliteDatabase
from shoal.store.threaded import ThreadedStore
from shoal.store.transaction import Tx
from shoal.store.urls import parse_url, unknown

ChainKey = Callable[[Tx], bytes]


def open_store(
    url: str, *, clock: Clock, leader: str | None = None, chain_key: ChainKey | None = None
) -> ThreadedStore:
    """Open what `url` names, creating or upgrading its tables. Blocks until that is done.

    `sqlite:///relative`, `sqlite:////absolute` or `postgresql+psycopg://user@host/name`.
    `leader`: the address of a control plane that leads from now on, where others may wait to; it has to write
    something every second. `chain_key` looks whose database it is and returns what its event log is chained
    with; where it raises, nothing was changed. `StateError`: another control plane has it, or a newer Shoal
    wrote it. `StoreUnavailable`: the disk or the server does not answer. Nothing is held after either.
    """
    database = _database(url, is_watched=leader is not None)
    try:
        return ThreadedStore(database, _connect(database, clock, leader, chain_key), clock)
    except DBAPIError as error:
        database.close()
        raise unavailable(error) from error
    except BaseException:
        database.close()
        raise


def _connect(database: Database, clock: Clock, leader: str | None, chain_key: ChainKey | None) -> Connection:
    """The writer's connection, its tables up to date. It is open before any reader's."""
    connection = database.connect_writer()
    try:
        database.begin_write(connection)
        migrate(connection)
        if chain_key is not None:
            database.chain_key = chain_key(Tx(connection))
        has_terms = leader is not None and isinstance(database, PostgresDatabase)
        term = take_lead(Tx(connection, database.chain_key), clock.now(), leader or "") if has_terms else 0
        connection.commit()
    except BaseException:
        connection.close()
        raise
    database.term = term
    return connection


def _database(url: str, *, is_watched: bool) -> Database:
    parsed = parse_url(url)
    backend = parsed.get_backend_name()
    if backend == "sqlite" and parsed.database not in (None, "", ":memory:"):
        return SqliteDatabase(Path(str(parsed.database)))
    if backend == "postgresql":
        return PostgresDatabase(parsed, is_watched=is_watched)
    raise unknown(parsed.drivername)
