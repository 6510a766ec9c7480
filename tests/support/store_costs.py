"""What each transaction does, counted: so that how long it may take does not depend on the machine.

What each read of the store costs, in steps of SQLite: so that a bound does not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection

from shoal.fair_threads import CALLER, CONTROL_PLANE
from shoal.store import threads
from shoal.store.session import Session
from shoal.store.transaction import ChangeResult, Committer, Tx


class CountedChange:
    """One change of the store by one caller."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.name = getattr(fn, "__qualname__", repr(fn))
        self.num_statements = 0
        """Statements run, and rows of those that are run for many."""


@contextmanager
def counted_changes() -> Iterator[list[CountedChange]]:
    """The changes that are applied while the block lasts, by all stores of this process, in order."""
    changes: list[CountedChange] = []
    apply, send, ask, run_many = Committer.apply, Session.send, Session.__init__, Session.run_many
    is_applying = False

    def count(number: int) -> None:
        if is_applying and changes:
            changes[-1].num_statements += number

    def counting_apply(self: Committer, fn: Callable[[Tx], Any]) -> ChangeResult:
        nonlocal is_applying
        changes.append(CountedChange(fn))
        is_applying = True
        try:
            return apply(self, fn)
        finally:
            is_applying = False

    def counting_send(self: Session, text: str, parameters: Any = ()) -> Any:
        count(1)
        return send(self, text, parameters)

    def counting_init(self: Session, connection: Any) -> None:
        ask(self, connection)
        asked = self.query

        def counting_ask(*args: Any) -> Any:
            count(1)
            return asked(*args)

        self.query = counting_ask

    def counting_many(self: Session, statement: Any, rows: Iterable[Any]) -> None:
        given = list(rows)
        count(len(given))
        run_many(self, statement, given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Committer, "apply", counting_apply)
        patch.setattr(Session, "send", counting_send)
        patch.setattr(Session, "__init__", counting_init)
        patch.setattr(Session, "run_many", counting_many)
        yield changes


STEPS_AT_ONCE = 100
"""Steps are counted in so many at once."""


class CountedRead:
    """One read of the store, by the caller of a request."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        inner = fn.func if isinstance(fn, partial) else fn
        self.name = getattr(inner, "__qualname__", repr(inner))
        self.num_steps = 0

    def __call__(self, *args: Any) -> Any:
        return self._fn(*args)


@contextmanager
def counted_reads() -> Iterator[list[CountedRead]]:
    """The reads for callers that end while the block lasts, of all SQLite stores of this process."""
    reads: list[CountedRead] = []
    ask, submit = threads.run_read, threads.ReaderThreads.submit

    def naming(self: threads.ReaderThreads, fn: Callable[..., Any]) -> Any:
        return submit(self, fn if CALLER.get() == CONTROL_PLANE else CountedRead(fn))

    def counting(connection: Connection, read: Callable[..., Any], chain_key: bytes) -> Any:
        if not isinstance(read, CountedRead):
            return ask(connection, read, chain_key)
        driver: Any = connection.connection.dbapi_connection

        def count() -> None:
            read.num_steps += STEPS_AT_ONCE

        driver.set_progress_handler(count, STEPS_AT_ONCE)
        try:
            return ask(connection, read, chain_key)
        finally:
            driver.set_progress_handler(None, STEPS_AT_ONCE)
            reads.append(read)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "run_read", counting)
        patch.setattr(threads.ReaderThreads, "submit", naming)
        yield reads
