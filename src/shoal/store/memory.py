"""A store in memory that runs every call at once in the calling thread, for simulation and tests.

It has the same tables, statements and savepoints as on disk. Only threads and durability are missing, so a
simulation is deterministic.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from functools import cache

from sqlalchemy import Connection, Engine, NullPool, create_engine
from sqlalchemy.exc import DBAPIError

from shoal.errors import Bug, StoreUnavailable
from shoal.store.base import OnCommit, T
from shoal.store.database import unavailable_error
from shoal.store.migrations import migrate
from shoal.store.sqlite import begin, prepare
from shoal.store.threads import run_read
from shoal.store.transaction import Committer, Tx


def open_memory_store() -> MemoryStore:
    """An empty store. It is cheap, because the tables are made once per process and then copied."""
    return MemoryStore()


class MemoryStore:
    """See `Store` for the contract. `write` and `read` never wait, so no other task runs meanwhile."""

    def __init__(self) -> None:
        self._database = MemoryDatabase()
        self._committer = Committer(self._database, self._database.connect_writer())
        self._callbacks: list[OnCommit] = []
        self._is_closed = False

    async def write(self, fn: Callable[[Tx], T], *, patience_s: float = 0.0) -> T:
        self._check_open()
        self._committer.begin()
        answer = self._committer.apply(fn)
        seq = self._committer.commit()
        for callback in self._callbacks:
            callback(seq)
        if answer.error is not None:
            raise answer.error
        value: T = answer.value
        return value

    async def read(self, fn: Callable[[Tx], T]) -> T:
        self._check_open()
        connection = self._database.connect_reader()
        self._database.begin_read(connection)
        connection.exec_driver_sql("PRAGMA query_only = ON")
        try:
            return run_read(connection, fn, self._database.chain_key)
        except DBAPIError as error:
            raise unavailable_error(error) from error
        finally:
            connection.exec_driver_sql("PRAGMA query_only = OFF")
            connection.rollback()

    def on_commit(self, callback: OnCommit) -> None:
        self._callbacks.append(callback)

    async def close(self) -> None:
        self._is_closed = True
        self._committer.abandon()

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreUnavailable("the store is closed")


class MemoryDatabase:
    """One connection, which is the database. Losing it loses everything, so it is never replaced."""

    term = 0
    chain_key = b""

    def __init__(self) -> None:
        self._connection = _copies().connect()

    def connect_writer(self) -> Connection:
        if self._connection.invalidated or self._connection.closed:
            raise Bug("the in-memory database was lost after an error")
        return self._connection

    def connect_reader(self) -> Connection:
        return self.connect_writer()

    def begin_write(self, writer: Connection) -> None:
        begin(writer, "BEGIN")

    def begin_read(self, reader: Connection) -> None:
        begin(reader, "BEGIN")

    def tidy(self, writer: Connection) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Do nothing: the user of the connection closes it."""


@cache
def _copies() -> Engine:
    """An engine whose every connection is a new database. One engine serves all, so statements are compiled
    once.
    """
    template = _migrated()

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(":memory:", check_same_thread=False)
        connection.deserialize(template)
        prepare(connection, "journal_mode = MEMORY", "synchronous = OFF")
        return connection

    return create_engine("sqlite://", creator=connect, poolclass=NullPool, hide_parameters=True)


def _migrated() -> bytes:
    """The tables of a new store, as the bytes of a database file."""
    blank = sqlite3.connect(":memory:")
    prepare(blank)
    engine = create_engine("sqlite://", creator=lambda: blank, poolclass=NullPool)
    with engine.connect() as connection:
        begin(connection, "BEGIN")
        migrate(connection)
        connection.commit()
        return blank.serialize()
