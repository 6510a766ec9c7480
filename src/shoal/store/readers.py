"""Reading: a few threads, each with a connection that cannot write."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from shoal.fair_threads import FairThreads
from shoal.store.base import T
from shoal.store.database import OWN_FAULT, Database, drop, refused, unavailable
from shoal.store.transaction import Tx

NUM_READERS = 4


class Readers:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._idle: SimpleQueue[Connection] = SimpleQueue()
        self._threads = FairThreads(NUM_READERS, "shoal-store-reader")
        # One connection stays open from now on: in SQLite the last one to close checkpoints, and a
        # writer that lets go of a failing disk should not do so with a checkpoint.
        self.read(lambda tx: tx.events.head())

    def submit(self, fn: Callable[[Tx], T]) -> Future[T]:
        """Have `read` run on a thread, in the turn of the caller that the request under way is of."""
        return self._threads.submit(lambda: self.read(fn))

    def read(self, fn: Callable[[Tx], T]) -> T:
        """Answer from one consistent view. A connection that died meanwhile is replaced, once."""
        while (connection := self._take()) is not None:
            try:
                return self._ask(connection, fn)
            except DBAPIError:
                continue
        try:
            return self._ask(self._database.connect_reader(), fn)
        except DBAPIError as error:
            raise unavailable(error) from error

    def close(self) -> None:
        """Wait for running reads, then close the connections."""
        self._threads.close()
        while (connection := self._take()) is not None:
            connection.close()

    def _take(self) -> Connection | None:
        try:
            return self._idle.get_nowait()
        except Empty:
            return None

    def _ask(self, connection: Connection, fn: Callable[[Tx], T]) -> T:
        try:
            self._database.begin_read(connection)
            try:
                return ask(connection, fn, self._database.chain_key)
            finally:
                connection.rollback()
        except DBAPIError:
            drop(connection)
            raise
        finally:
            if not connection.closed:
                self._idle.put(connection)


def ask(connection: Connection, fn: Callable[[Tx], T], chain_key: bytes) -> T:
    try:
        return fn(Tx(connection, chain_key))
    except OWN_FAULT as error:
        refused(error)
