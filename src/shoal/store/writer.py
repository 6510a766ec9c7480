"""The one thread that writes. Group commit: whoever waits while it syncs shares the next sync.

A caller is answered only after COMMIT. When that fails everybody in the batch hears
`StoreUnavailable`, and the next batch starts on a fresh connection; nothing has to be restarted
when the disk or the server is back.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from math import inf
from typing import Any

from shoal.clock import Clock
from shoal.errors import StoreUnavailable
from shoal.store.base import OnCommit
from shoal.store.commit import Answer, Committer
from shoal.store.line import Change, Line

MAX_CHANGES = 256
MAX_BATCH_S = 0.010
"""A batch takes what waits and closes after this: an early caller should not pay for a late one."""
TIDY_EVERY = 200
"""Changes between two checkpoints: some 20 MiB of SQLite's log when each is a commit alone."""
TIDY_AT_LAST = 3 * TIDY_EVERY
"""While somebody waits: a checkpoint takes as long as several commits."""
IDLE_S = 1.0

log = logging.getLogger("shoal.store")


class Writer:
    def __init__(self, committer: Committer, clock: Clock) -> None:
        self._committer = committer
        self._clock = clock
        self._line = Line(clock)
        self._untidy = 0
        self._callbacks: list[OnCommit] = []
        self._thread = threading.Thread(target=self._work, name="shoal-store-writer", daemon=True)
        self._thread.start()

    def put(self, change: Change) -> None:
        self._line.put(change)

    def on_commit(self, callback: OnCommit) -> None:
        self._callbacks.append(callback)

    def close(self) -> None:
        """Finish what was put before, then end the thread. Blocks; may be repeated."""
        self._line.close()
        self._thread.join()

    def _work(self) -> None:
        while True:
            change = self._line.wait(IDLE_S if self._untidy else None)
            if change is not None:
                self._serve(change)
            elif self._line.is_over:
                break
            else:
                self._tidy()
        self._committer.abandon()

    def _serve(self, first: Change) -> None:
        """One batch, from its first change."""
        taken: list[Change] = []
        answers: list[Answer] = []
        try:
            change: Change | None = first
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
            # The thread must outlive even a mistake of ours.
            log.exception("the writer failed")
            self._committer.abandon()
            _refuse(taken or [first], f"the store's writer failed: {error!r}", None)
            return
        self._announce(seq)
        _settle(taken, answers)
        self._untidy += len(taken)
        if self._untidy >= (TIDY_EVERY if self._line.is_empty else TIDY_AT_LAST):
            self._tidy()

    def _next(self, num_taken: int, deadline: float, *, is_urgent: bool) -> Change | None:
        """The next change of this batch, if any. Who has patience left holds up nobody who has none."""
        now = self._clock.monotonic()
        if num_taken >= MAX_CHANGES or now >= deadline:
            return None
        return self._line.take(now if is_urgent else inf)

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
    changes: list[Change], message: str, hint: str | None, kind: type[StoreUnavailable] = StoreUnavailable
) -> None:
    """Each caller gets an error of its own: a shared one would collect all their tracebacks."""
    _settle(changes, [Answer(error=kind(message, hint=hint)) for _ in changes])


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
