"""The threads of a store: the queue of changes, the readers, and the one writer.

The queue is first come, first served, except for callers with patience. If a client submits jobs faster than
they can start, the changes that end jobs, and the plans that use the freed room, would wait behind its
submissions, and the client would gain nothing. So submissions let other changes pass.

Readers are a few threads, each with a connection that cannot write.

The writer commits in groups: callers that wait during one sync share the next sync. A caller gets its answer
only after COMMIT. If COMMIT fails, every caller in the batch gets `StoreUnavailable`, and the next batch
starts on a fresh connection. When the disk or the server is back, no restart is needed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from heapq import heappop, heappush
from itertools import count
from math import inf
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from shoal.clock import Clock
from shoal.errors import StoreUnavailable
from shoal.fair_threads import FairThreads
from shoal.store.base import OnCommit, T
from shoal.store.database import STATEMENT_ERRORS, Database, drop, raise_refused, unavailable_error
from shoal.store.transaction import ChangeResult, Committer, Tx


class QueuedChange(NamedTuple):
    fn: Callable[[Tx], Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    patience_s: float = 0.0
    """How long the change lets others pass."""


class ChangeQueue:
    """Any thread puts changes; one thread takes them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._door = threading.Condition()
        self._waiting: list[tuple[float, int, QueuedChange]] = []
        """Sorted by the moment until which each change lets others pass, then by arrival."""
        self._arrivals = count()
        self._is_closed = False

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    @property
    def is_finished(self) -> bool:
        """The queue is closed and empty. A change may have come right before it was closed."""
        return self._is_closed and self.is_empty

    def put(self, change: QueuedChange) -> None:
        with self._door:
            if self._is_closed:
                raise StoreUnavailable("the store is closed")
            heappush(
                self._waiting, (self._clock.monotonic() + change.patience_s, next(self._arrivals), change)
            )
            self._door.notify()

    def close(self) -> None:
        """Accept no more changes. Changes already in the queue are still taken."""
        with self._door:
            self._is_closed = True
            self._door.notify()

    def wait(self, timeout_s: float | None) -> QueuedChange | None:
        """The next change as soon as there is one. None at the timeout, or if the queue is
        closed and empty.
        """
        with self._door:
            self._door.wait_for(lambda: self._waiting or self._is_closed, timeout_s)
            return self._take()

    def take(self, until: float = inf) -> QueuedChange | None:
        """The next change, if there is one that lets others pass no longer than until then."""
        with self._door:
            return self._take() if self._waiting and self._waiting[0][0] <= until else None

    def _take(self) -> QueuedChange | None:
        return heappop(self._waiting)[2] if self._waiting else None


NUM_READERS = 4


class ReaderThreads:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._idle: SimpleQueue[Connection] = SimpleQueue()
        self._threads = FairThreads(NUM_READERS, "shoal-store-reader")
        # One connection stays open from now on. In SQLite the last connection to close checkpoints, and a
        # writer that drops a failing disk should not do so with a checkpoint.
        self.read(lambda tx: tx.events.head())

    def submit(self, fn: Callable[[Tx], T]) -> Future[T]:
        """Have a thread run `read`, in the turn of the caller whose request is under way."""
        return self._threads.submit(lambda: self.read(fn))

    def read(self, fn: Callable[[Tx], T]) -> T:
        """Answer from one consistent view. If the connection has died meanwhile, replace it once."""
        while (connection := self._take()) is not None:
            try:
                return self._ask(connection, fn)
            except DBAPIError:
                continue
        try:
            return self._ask(self._database.connect_reader(), fn)
        except DBAPIError as error:
            raise unavailable_error(error) from error

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
                return run_read(connection, fn, self._database.chain_key)
            finally:
                connection.rollback()
        except DBAPIError:
            drop(connection)
            raise
        finally:
            if not connection.closed:
                self._idle.put(connection)


def run_read(connection: Connection, fn: Callable[[Tx], T], chain_key: bytes) -> T:
    try:
        return fn(Tx(connection, chain_key))
    except STATEMENT_ERRORS as error:
        raise_refused(error)


MAX_CHANGES = 256
MAX_BATCH_S = 0.010
"""A batch takes what waits and closes after this time: an early caller should not pay for a late one."""
TIDY_EVERY = 200
"""Changes between two checkpoints: about 20 MiB of SQLite's log if each change is a commit of its own."""
TIDY_AT_LAST = 3 * TIDY_EVERY
"""The limit while a caller waits: a checkpoint takes as long as several commits."""
IDLE_S = 1.0

log = logging.getLogger("shoal.store")


class WriterThread:
    def __init__(self, committer: Committer, clock: Clock) -> None:
        self._committer = committer
        self._clock = clock
        self._queue = ChangeQueue(clock)
        self._untidy = 0
        self._callbacks: list[OnCommit] = []
        self._thread = threading.Thread(target=self._work, name="shoal-store-writer", daemon=True)
        self._thread.start()

    def put(self, change: QueuedChange) -> None:
        self._queue.put(change)

    def on_commit(self, callback: OnCommit) -> None:
        self._callbacks.append(callback)

    def close(self) -> None:
        """Finish what was put before, then end the thread. Blocks; may be repeated."""
        self._queue.close()
        self._thread.join()

    def _work(self) -> None:
        while True:
            change = self._queue.wait(IDLE_S if self._untidy else None)
            if change is not None:
                self._serve(change)
            elif self._queue.is_finished:
                break
            else:
                self._tidy()
        self._committer.abandon()

    def _serve(self, first: QueuedChange) -> None:
        """One batch, from its first change."""
        taken: list[QueuedChange] = []
        answers: list[ChangeResult] = []
        try:
            change: QueuedChange | None = first
            deadline, is_urgent = self._clock.monotonic() + MAX_BATCH_S, False
            self._committer.begin()
            while change is not None:
                taken.append(change)
                answers.append(self._committer.apply(change.fn))
                is_urgent |= not change.patience_s
                change = self._next(len(taken), deadline, is_urgent=is_urgent)
            seq = self._committer.commit()
        except StoreUnavailable as error:
            _refuse(taken or [first], error.message, error.hint, type(error))
            return
        except Exception as error:
            # The thread must outlive even a bug of ours.
            log.exception("the writer failed")
            self._committer.abandon()
            _refuse(taken or [first], f"the store's writer failed: {error!r}", None)
            return
        self._announce(seq)
        _settle(taken, answers)
        self._untidy += len(taken)
        if self._untidy >= (TIDY_EVERY if self._queue.is_empty else TIDY_AT_LAST):
            self._tidy()

    def _next(self, num_taken: int, deadline: float, *, is_urgent: bool) -> QueuedChange | None:
        """The next change of this batch, if any. A change with patience left delays no change without."""
        now = self._clock.monotonic()
        if num_taken >= MAX_CHANGES or now >= deadline:
            return None
        return self._queue.take(now if is_urgent else inf)

    def _announce(self, seq: int) -> None:
        for callback in self._callbacks:
            try:
                callback(seq)
            except Exception:
                log.exception("a commit callback failed")

    def _tidy(self) -> None:
        self._untidy = 0
        try:
            self._committer.tidy()
        except Exception as error:  # noqa: BLE001 - housekeeping is tried again after the next writes
            log.warning("housekeeping of the database failed: %s", error)


def _refuse(
    changes: list[QueuedChange],
    message: str,
    hint: str | None,
    kind: type[StoreUnavailable] = StoreUnavailable,
) -> None:
    """Give each caller an error of its own. A shared error would collect all their tracebacks."""
    _settle(changes, [ChangeResult(error=kind(message, hint=hint)) for _ in changes])


def _settle(changes: list[QueuedChange], answers: list[ChangeResult]) -> None:
    """Wake each event loop once, with all of its answers."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], ChangeResult]]] = {}
    for change, answer in zip(changes, answers, strict=True):
        by_loop.setdefault(change.loop, []).append((change.future, answer))
    for loop, settled in by_loop.items():
        try:
            loop.call_soon_threadsafe(_set, settled)
        except RuntimeError:
            # The loop was closed, so no caller waits any more.
            continue


def _set(settled: list[tuple[asyncio.Future[Any], ChangeResult]]) -> None:
    for future, answer in settled:
        if future.done():
            continue  # its caller was cancelled
        if answer.error is not None:
            future.set_exception(answer.error)
        else:
            future.set_result(answer.value)
