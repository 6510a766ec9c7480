"""The one thread that writes. Group commit: whoever waits while it syncs shares the next sync.

A caller is answered only after COMMIT. When that fails everybody in the batch hears
`StoreUnavailable`, and the next batch starts on a fresh connection; nothing has to be restarted
when the disk or the server is back.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from shoal.clock import Clock
from shoal.errors import StoreUnavailable
from shoal.store.base import OnCommit
from shoal.store.commit import Answer, Committer
from shoal.store.transaction import Tx

MAX_CHANGES = 256
MAX_BATCH_S = 0.010
"""A batch takes what waits and closes after this: an early caller should not pay for a late one."""
TIDY_EVERY = 200
"""Changes between two checkpoints while busy: some 20 MiB of SQLite's log when each is a commit alone."""
IDLE_S = 1.0

log = logging.getLogger("shoal.store")


class Change(NamedTuple):
    fn: Callable[[Tx], Any]
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Any]


class Writer:
    def __init__(self, committer: Committer, clock: Clock) -> None:
        self._committer = committer
        self._clock = clock
        self._waiting: SimpleQueue[Change | None] = SimpleQueue()
        self._door = threading.Lock()
        self._is_closed = False
        self._untidy = 0
        self._callbacks: list[OnCommit] = []
        self._thread = threading.Thread(target=self._work, name="shoal-store-writer", daemon=True)
        self._thread.start()

    def put(self, change: Change) -> None:
        with self._door:
            if self._is_closed:
                raise StoreUnavailable("the store is closed")
            self._waiting.put(change)

    def on_commit(self, callback: OnCommit) -> None:
        self._callbacks.append(callback)

    def close(self) -> None:
        """Finish what was put before, then end the thread. Blocks; may be repeated."""
        with self._door:
            if not self._is_closed:
                self._is_closed = True
                self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        is_open = True
        while is_open:
            try:
                change = self._waiting.get(timeout=IDLE_S if self._untidy else None)
            except Empty:
                self._tidy()
                continue
            if change is None:
                break
            is_open = self._serve(change)
        self._committer.abandon()

    def _serve(self, first: Change) -> bool:
        """One batch, from its first change. False when the writer was asked to close meanwhile."""
        taken: list[Change] = []
        answers: list[Answer] = []
        is_open = True
        try:
            change: Change | None = first
            deadline = self._clock.monotonic() + MAX_BATCH_S
            self._committer.begin()
            while change is not None:
                taken.append(change)
                answers.append(self._committer.apply(change.fn))
                change, is_open = self._next(len(taken), deadline)
            seq = self._committer.commit()
        except StoreUnavailable as error:
            _refuse(taken or [first], error.message, error.hint)
            return is_open
        except Exception as error:
            # The thread must outlive even a mistake of ours.
            log.exception("the writer failed")
            self._committer.abandon()
            _refuse(taken or [first], f"the store's writer failed: {error!r}", None)
            return is_open
        self._announce(seq)
        _settle(taken, answers)
        self._untidy += len(taken)
        if self._untidy >= TIDY_EVERY:
            self._tidy()
        return is_open

    def _next(self, num_taken: int, deadline: float) -> tuple[Change | None, bool]:
        """The next change of this batch, if any; and whether more may come after it."""
        if num_taken >= MAX_CHANGES or self._clock.monotonic() >= deadline:
            return None, True
        try:
            change = self._waiting.get_nowait()
        except Empty:
            return None, True
        return change, change is not None

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


def _refuse(changes: list[Change], message: str, hint: str | None) -> None:
    """Each caller gets an error of its own: a shared one would collect all their tracebacks."""
    _settle(changes, [Answer(error=StoreUnavailable(message, hint=hint)) for _ in changes])


def _settle(changes: list[Change], answers: list[Answer]) -> None:
    """Wake each event loop once, with all that is for it."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Answer]]] = {}
    for change, answer in zip(changes, answers, strict=True):
        by_loop.setdefault(change.loop, []).append((change.answer, answer))
    for loop, settled in by_loop.items():
        try:
            loop.call_soon_threadsafe(_set, settled)
        except RuntimeError:
            # The loop was closed: nobody waits any more.
            continue


def _set(settled: list[tuple[asyncio.Future[Any], Answer]]) -> None:
    for future, answer in settled:
        if future.done():
            continue  # its caller was cancelled
        if answer.error is not None:
            future.set_exception(answer.error)
        else:
            future.set_result(answer.value)
