"""The store of a running control plane: a writer thread, reader threads, and an asyncio interface.

`open_store` turns a URL into an open store with tables of this version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import anyio.to_thread
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from shoal.clock import Clock
from shoal.errors import StoreUnavailable
from shoal.store.base import LogHead, OnCommit, T
from shoal.store.copying import copy_sqlite
from shoal.store.database import Database, parse_url, unavailable_error, unknown_database
from shoal.store.leadership import begin_term
from shoal.store.migrations import migrate
from shoal.store.postgres import PostgresDatabase
from shoal.store.sqlite import SqliteDatabase
from shoal.store.threads import QueuedChange, ReaderThreads, WriterThread
from shoal.store.transaction import Committer, Tx


class ThreadedStore:
    """See `Store` for the contract. Used from one or several event loops."""

    def __init__(self, database: Database, writer: Connection, clock: Clock) -> None:
        self._database = database
        self._readers = ReaderThreads(database)
        self._writer = WriterThread(Committer(database, writer), clock)
        self._is_closed = False
        self._watchers: list[Callable[[StoreUnavailable | None], None]] = []

    async def write(self, fn: Callable[[Tx], T], *, patience_s: float = 0.0) -> T:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._writer.put(QueuedChange(fn, loop, answer, patience_s))
        try:
            value = await answer
        except StoreUnavailable as error:
            self._notify_watchers(error)
            raise
        self._notify_watchers(None)
        return value

    def watch_writes(self, watcher: Callable[[StoreUnavailable | None], None]) -> None:
        """Call `watcher` after each write, on the event loop of the caller that wrote. It gets None, or the
        error if the database could not take the write, as on a full disk.
        """
        self._watchers.append(watcher)

    def _notify_watchers(self, error: StoreUnavailable | None) -> None:
        for watcher in self._watchers:
            watcher(error)

    async def read(self, fn: Callable[[Tx], T]) -> T:
        if self._is_closed:
            raise StoreUnavailable("the store is closed")
        return await asyncio.wrap_future(self._readers.submit(fn))

    def on_commit(self, callback: OnCommit) -> None:
        self._writer.on_commit(callback)

    @property
    def term(self) -> int:
        """The term of the control plane that leads through this store; 0 if the database has no terms."""
        return self._database.term

    def on_deposed(self, callback: Callable[[], None]) -> None:
        """Have `callback` called once another control plane leads. Any thread may call it."""
        if isinstance(self._database, PostgresDatabase):
            self._database.on_deposed = callback

    def copy_to(self, target: Path) -> LogHead:
        """Copy a SQLite database as of one moment to a new file. Blocks; writers continue meanwhile.

        `StoreUnavailable`: the database cannot be read, or the disk does not take the copy.
        """
        try:
            with self._database.connect_reader() as reader:
                self._database.begin_read(reader)
                return copy_sqlite(reader, target)
        except DBAPIError as error:
            raise unavailable_error(error) from error

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            await anyio.to_thread.run_sync(self._close)

    def _close(self) -> None:
        # Readers first: the last connection to close checkpoints, and that must be the writer's.
        self._readers.close()
        self._writer.close()
        self._database.close()


ChainKey = Callable[[Tx], bytes]


def open_store(
    url: str, *, clock: Clock, leader: str | None = None, chain_key: ChainKey | None = None
) -> ThreadedStore:
    """Open the database that `url` names, creating or upgrading its tables. Blocks until that is done.

    `sqlite:///relative`, `sqlite:////absolute` or `postgresql+psycopg://user@host/name`. `leader`: the
    address of a control plane that leads from now on, if others may wait to lead; it has to write something
    every second. `chain_key` checks which home the database belongs to and returns the key of its event log.
    If it raises, nothing was changed. `StateError`: another control plane has the database, or a newer Shoal
    wrote it. `StoreUnavailable`: the disk or the server does not answer. After either error nothing is held.
    """
    database = _database(url, is_watched=leader is not None)
    try:
        return ThreadedStore(database, _connect(database, clock, leader, chain_key), clock)
    except DBAPIError as error:
        database.close()
        raise unavailable_error(error) from error
    except BaseException:
        database.close()
        raise


def _connect(database: Database, clock: Clock, leader: str | None, chain_key: ChainKey | None) -> Connection:
    """Return the writer's connection, with its tables up to date. It is open before any reader's."""
    connection = database.connect_writer()
    try:
        database.begin_write(connection)
        migrate(connection)
        if chain_key is not None:
            database.chain_key = chain_key(Tx(connection))
        has_terms = leader is not None and isinstance(database, PostgresDatabase)
        term = begin_term(Tx(connection, database.chain_key), clock.now(), leader or "") if has_terms else 0
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
    raise unknown_database(parsed.drivername)
