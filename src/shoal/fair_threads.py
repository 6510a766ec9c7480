"""A thread pool that callers share fairly.

The pool serves callers in rotation, and one caller never takes all threads. The work of a caller waits for
that caller's earlier work, and for at most one turn of every other caller.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from threading import Lock
from typing import TypeVar

from shoal.errors import LimitReached

T = TypeVar("T")

MAX_WAITING = 1000
"""Tasks of one caller that have not begun."""
CONTROL_PLANE = ""
CALLER: ContextVar[str] = ContextVar("CALLER", default=CONTROL_PLANE)
"""The account for which the current asyncio task works, or the control plane itself."""


class FairThreads:
    """Run functions on `num_threads` threads, at most half of them for one caller."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_threads = num_threads
        self._lock = Lock()
        self._waiting: dict[str, deque[Callable[[], None]]] = {}
        """By caller, in the order of their turns."""
        self._running: Counter[str] = Counter()

    def submit(self, fn: Callable[[], T]) -> Future[T]:
        """Run `fn` in a turn of the current caller. `LimitReached`: too many of the caller's tasks wait."""
        caller, answer = CALLER.get(), Future[T]()

        def run() -> None:
            try:
                if answer.set_running_or_notify_cancel():
                    answer.set_result(fn())
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                answer.set_exception(error)
            finally:
                self._end(caller)

        with self._lock:
            waiting = self._waiting.setdefault(caller, deque())
            if len(waiting) >= MAX_WAITING and caller != CONTROL_PLANE:
                raise LimitReached(
                    f"{len(waiting)} of your requests wait for a thread; at most {MAX_WAITING} may",
                    hint="wait for answers before you send more",
                )
            waiting.append(run)
            self._begin()
        return answer

    def close(self) -> None:
        """Run all submitted functions, then return."""
        with self._lock:
            left = [run for waiting in self._waiting.values() for run in waiting]
            self._waiting.clear()
            for run in left:
                self._threads.submit(run)
        self._threads.shutdown()

    def _begin(self) -> None:
        """Start all functions that may start now. The caller holds the lock."""
        while self._running.total() < self._num_threads:
            caller = next((name for name in self._waiting if self._may_begin(name)), None)
            if caller is None:
                return
            waiting = self._waiting.pop(caller)
            run = waiting.popleft()
            if waiting:
                self._waiting[caller] = waiting  # behind all others
            self._running[caller] += 1
            self._threads.submit(run)

    def _may_begin(self, caller: str) -> bool:
        return caller == CONTROL_PLANE or self._running[caller] < self._num_threads // 2

    def _end(self, caller: str) -> None:
        with self._lock:
            self._running[caller] -= 1
            if self._running[caller] <= 0:
                del self._running[caller]
            self._begin()
