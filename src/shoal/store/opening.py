"""From a URL to an open store whose tables are those of this version."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import URL, Connection, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from shoal.clock import Clock
from shoal.errors import StateError
from shoal.store.database import Database, unavailable
from shoal.store.migrations import migrate
from shoal.store.postgres import PostgresDatabase
from shoal.store.sqlite import SqliteDatabase
from shoal.store.threaded import ThreadedStore


def open_store(url: str, *, clock: Clock) -> ThreadedStore:
    """Open what `url` names, creating or upgrading its tables. Blocks until that is done.

    `sqlite:///relative`, `sqlite:////absolute` or `postgresql+psycopg://user@host/name`.
    `StateError`: another control plane has it, or a newer Shoal wrote it. `StoreUnavailable`: the
    disk or the server does not answer. Nothing is held after either.
    """
    database = _database(url)
    try:
        return ThreadedStore(database, _connect(database), clock)
    except DBAPIError as error:
        database.close()
        raise unavailable(error) from error
    except BaseException:
        database.close()
        raise


def _connect(database: Database) -> Connection:
    """The writer's connection, its tables up to date. It is open before any reader's."""
    connection = database.connect_writer()
    try:
        database.begin_write(connection)
        migrate(connection)
        connection.commit()
    except BaseException:
        connection.close()
        raise
    return connection


def _database(url: str) -> Database:
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise _unknown(url.partition(":")[0]) from None
    backend = parsed.get_backend_name()
    if backend == "sqlite" and parsed.database not in (None, "", ":memory:"):
        return SqliteDatabase(Path(str(parsed.database)))
    if backend == "postgresql":
        return PostgresDatabase(_with_psycopg(parsed))
    raise _unknown(parsed.drivername)


def _with_psycopg(url: URL) -> URL:
    return url.set(drivername="postgresql+psycopg")


def _unknown(kind: str) -> StateError:
    """Names the kind alone: the rest of a URL may hold a password."""
    return StateError(
        f"cannot keep state in a `{kind}` database without a path or server",
        hint="use sqlite:////path/to/shoal.db or postgresql+psycopg://user@host/name",
    )
