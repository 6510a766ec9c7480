"""The store of a running control plane: a writer's thread, readers' threads, and asyncio before them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import anyio.to_thread
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from shoal.clock import Clock
from shoal.errors import StoreUnavailable
from shoal.store.base import Head, OnCommit, T
from shoal.store.commit import Committer
from shoal.store.copying import copy_sqlite
from shoal.store.database import Database, unavailable
from shoal.store.line import Change
from shoal.store.postgres import PostgresDatabase
from shoal.store.readers import Readers
from shoal.store.transaction import Tx
from shoal.store.writer import Writer


class ThreadedStore:
    """See `Store` for the contract. Used from one or several event loops."""

    def __init__(self, database: Database, writer: Connection, clock: Clock) -> None:
        self._database = database
        self._readers = Readers(database)
        self._writer = Writer(Committer(database, writer), clock)
        self._is_closed = False
        self._watchers: list[Callable[[StoreUnavailable | None], None]] = []

    async def write(self, fn: Callable[[Tx], T], *, patience_s: float = 0.0) -> T:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._writer.put(Change(fn, loop, answer, patience_s))
        try:
            value = await answer
        except StoreUnavailable as error:
            self._tell(error)
            raise
        self._tell(None)
        return value

    def watch_writes(self, watcher: Callable[[StoreUnavailable | None], None]) -> None:
        """Call `watcher` after each write: with the error if the database could not take it, as on a full
        disk, or with None. On the event loop of whoever wrote.
        """
        self._watchers.append(watcher)

    def _tell(self, error: StoreUnavailable | None) -> None:
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
        """Of the control plane that leads through this store; 0 where there are none."""
        return self._database.term

    def on_deposed(self, callback: Callable[[], None]) -> None:
        """Have `callback` called once another control plane leads, on some thread."""
        if isinstance(self._database, PostgresDatabase):
            self._database.on_deposed = callback

    def copy_to(self, target: Path) -> Head:
        """Copy a SQLite database as of one moment to a new file. Blocks; writers go on meanwhile.

        `StoreUnavailable`: the database cannot be read, or the disk does not take the copy.
        """
        try:
            with self._database.connect_reader() as reader:
                self._database.begin_read(reader)
                return copy_sqlite(reader, target)
        except DBAPIError as error:
            raise unavailable(error) from error

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            await anyio.to_thread.run_sync(self._close)

    def _close(self) -> None:
        # Readers first: the last connection to close checkpoints, and that must be the writer's.
        self._readers.close()
        self._writer.close()
        self._database.close()
