"""Several changes in one transaction, each able to fail alone; and what to do when the commit fails.

Used by the writer's thread and, in the caller's thread, by the in-memory store.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from shoal.errors import Deposed, StoreUnavailable
from shoal.store.database import OWN_FAULT, Database, drop, refused, unavailable
from shoal.store.transaction import Tx


class Answer(NamedTuple):
    """What a change returned, or what it raised."""

    value: Any = None
    error: BaseException | None = None


class Committer:
    """`begin`, then `apply` for each change, then `commit`.

    Any of them may raise `StoreUnavailable`: then nothing of the transaction was acknowledged, the
    connection is gone and the next `begin` opens another.
    """

    def __init__(self, database: Database, connection: Connection) -> None:
        self._database = database
        self._connection: Connection | None = connection
        self._tx: Tx | None = None

    def begin(self) -> None:
        """Tries once more on a fresh connection: the old one may have died since it was last used.

        `Deposed`: another control plane leads since, and nothing is ever written here again.
        """
        try:
            if self._connection is not None:
                try:
                    return self._begin(self._connection)
                except DBAPIError:
                    self.abandon()
            self._connection = self._database.connect_writer()
            self._begin(self._connection)
        except Deposed:
            self.abandon()
            raise
        except DBAPIError as error:
            self.abandon()
            raise unavailable(error) from error

    def apply(self, change: Callable[[Tx], Any]) -> Answer:
        """Run one change in a savepoint of its own. What it raises becomes its answer."""
        _, tx = self._current()
        try:
            head = tx.events.head()
            tx.session.send("SAVEPOINT change")
            answer = _answer(change, tx)
            if answer.error is not None:
                tx.session.send("ROLLBACK TO SAVEPOINT change")
                tx.rewind(head)
            tx.session.send("RELEASE SAVEPOINT change")
        except DBAPIError as error:
            self.abandon()
            raise unavailable(error) from error
        return answer

    def commit(self) -> int:
        """Make it durable and return the newest event's `seq`."""
        connection, tx = self._current()
        try:
            seq = tx.events.head().seq
            connection.commit()
        except DBAPIError as error:
            self.abandon()
            raise unavailable(error) from error
        self._tx = None
        return seq

    def tidy(self) -> None:
        if self._connection is None:
            return
        try:
            self._database.tidy(self._connection)
        except Exception:
            # Not a DBAPIError: housekeeping talks to the driver directly.
            self.abandon()
            raise

    def abandon(self) -> None:
        """Let go of a connection whose state is unknown; closing it undoes what was not committed."""
        if self._connection is not None:
            drop(self._connection)
        self._connection = None
        self._tx = None

    def _begin(self, connection: Connection) -> None:
        self._database.begin_write(connection)
        self._tx = Tx(connection, self._database.chain_key)

    def _current(self) -> tuple[Connection, Tx]:
        if self._connection is None or self._tx is None:
            raise StoreUnavailable("no transaction is open")
        return self._connection, self._tx


def _answer(change: Callable[[Tx], Any], tx: Tx) -> Answer:
    """A driver's error that leaves the connection unknown goes through; the rest is the answer."""
    try:
        try:
            return Answer(value=change(tx))
        except OWN_FAULT as error:
            refused(error)
    except DBAPIError:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the caller's to see
        return Answer(error=error)
