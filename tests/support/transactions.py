"""What each transaction does, counted: so that how long it may take does not depend on the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from shoal.store.commit import Answer, Committer
from shoal.store.prepared import Session
from shoal.store.transaction import Tx


class Change:
    """One change of the store by one caller."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.name = getattr(fn, "__qualname__", repr(fn))
        self.num_statements = 0
        """Statements run, and rows of those that are run for many."""


@contextmanager
def counted() -> Iterator[list[Change]]:
    """The changes that are applied while the block lasts, by all stores of this process, in order."""
    changes: list[Change] = []
    apply, send, ask, run_many = Committer.apply, Session.send, Session.__init__, Session.run_many
    is_applying = False

    def count(number: int) -> None:
        if is_applying and changes:
            changes[-1].num_statements += number

    def counting_apply(self: Committer, fn: Callable[[Tx], Any]) -> Answer:
        nonlocal is_applying
        changes.append(Change(fn))
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
        asked = self.ask

        def counting_ask(*args: Any) -> Any:
            count(1)
            return asked(*args)

        self.ask = counting_ask

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
