"""What each read of the store costs, in steps of SQLite: so that a bound does not depend on the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection

from shoal.fair_threads import CALLER, ITSELF
from shoal.store import readers

EVERY = 100
"""Steps are counted in so many at once."""


class Read:
    """One read of the store, by the caller of a request."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        inner = fn.func if isinstance(fn, partial) else fn
        self.name = getattr(inner, "__qualname__", repr(inner))
        self.num_steps = 0

    def __call__(self, *args: Any) -> Any:
        return self._fn(*args)


@contextmanager
def counted_reads() -> Iterator[list[Read]]:
    """The reads for callers that end while the block lasts, of all SQLite stores of this process."""
    reads: list[Read] = []
    ask, submit = readers.ask, readers.Readers.submit

    def naming(self: readers.Readers, fn: Callable[..., Any]) -> Any:
        return submit(self, fn if CALLER.get() == ITSELF else Read(fn))

    def counting(connection: Connection, read: Callable[..., Any], chain_key: bytes) -> Any:
        if not isinstance(read, Read):
            return ask(connection, read, chain_key)
        driver: Any = connection.connection.dbapi_connection

        def count() -> None:
            read.num_steps += EVERY

        driver.set_progress_handler(count, EVERY)
        try:
            return ask(connection, read, chain_key)
        finally:
            driver.set_progress_handler(None, EVERY)
            reads.append(read)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "ask", counting)
        patch.setattr(readers.Readers, "submit", naming)
        yield reads
