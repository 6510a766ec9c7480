"""What a change or a query sees of the store: one table object for each noun.

`Committer` runs several changes in one transaction, each able to fail alone, and handles a failed commit. The
writer's thread uses it, and the in-memory store in the caller's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from shoal.errors import Deposed, StoreUnavailable
from shoal.store.base import LogHead
from shoal.store.database import STATEMENT_ERRORS, Database, drop, raise_refused, unavailable_error
from shoal.store.session import Session
from shoal.store.tables.attempts import AttemptTable
from shoal.store.tables.bookkeeping import DailyCountTable, IdempotencyKeyTable, MetaTable
from shoal.store.tables.events import EventLog
from shoal.store.tables.jobs import JobTable
from shoal.store.tables.metrics import MetricTable
from shoal.store.tables.nodes import NodeTable, WindowTable
from shoal.store.tables.people import PeopleChanges, PeopleTable
from shoal.store.tables.services import ServiceTable
from shoal.store.tables.submissions import ArrayWorkTable, JobSubmissions, LeftBehindTable, SecretTable
from shoal.store.tables.tokens import TokenTable


class Tx:
    """Valid for one transaction on one thread. Using it afterwards is a bug."""

    def __init__(self, connection: Connection, chain_key: bytes = b"") -> None:
        self.session = session = Session(connection)
        """For the store itself, and for tests that reach below the tables."""
        self.jobs = JobTable(session)
        self.attempts = AttemptTable(session)
        self.submissions = JobSubmissions(session)
        self.array_work = ArrayWorkTable(session)
        self.daily_counts = DailyCountTable(session)
        self.nodes = NodeTable(session)
        self.services = ServiceTable(session)
        self.windows = WindowTable(session)
        self.events = EventLog(session, chain_key)
        self.keys = IdempotencyKeyTable(session)
        self.people_changes = changes = PeopleChanges()
        """Changes of people and tokens, until an event carries them."""
        self.people = PeopleTable(session, changes)
        self.tokens = TokenTable(session, self.people, changes)
        self.secrets = SecretTable(session)
        self.left_behind = LeftBehindTable(session)
        self.metrics = MetricTable(session)
        self.meta = MetaTable(session)

    def rewind(self, head: LogHead) -> None:
        """Forget what was done after `head`. The writer calls this when it undoes a change."""
        self.events.rewind(head)
        self.people_changes.take()
        self.jobs.forget()
        self.attempts.forget()


class ChangeResult(NamedTuple):
    """The value that a change returned, or the error that it raised."""

    value: Any = None
    error: BaseException | None = None


class Committer:
    """`begin`, then `apply` for each change, then `commit`.

    Any of them may raise `StoreUnavailable`. Then nothing of the transaction was acknowledged, the connection
    is closed, and the next `begin` opens another.
    """

    def __init__(self, database: Database, connection: Connection) -> None:
        self._database = database
        self._connection: Connection | None = connection
        self._tx: Tx | None = None

    def begin(self) -> None:
        """Begin a transaction. Tries once more on a fresh connection, because the old one may have died since
        its last use.

        `Deposed`: another control plane leads, so nothing is ever written here again.
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
            raise unavailable_error(error) from error

    def apply(self, change: Callable[[Tx], Any]) -> ChangeResult:
        """Run one change in a savepoint of its own. An error that it raises becomes its result."""
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
            raise unavailable_error(error) from error
        return answer

    def commit(self) -> int:
        """Make the transaction durable and return the newest event's `seq`."""
        connection, tx = self._current()
        try:
            seq = tx.events.head().seq
            connection.commit()
        except DBAPIError as error:
            self.abandon()
            raise unavailable_error(error) from error
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
        """Close a connection whose state is unknown, which undoes uncommitted changes."""
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


def _answer(change: Callable[[Tx], Any], tx: Tx) -> ChangeResult:
    """Run the change and return its result. A driver error that leaves the connection unknown is raised."""
    try:
        try:
            return ChangeResult(value=change(tx))
        except STATEMENT_ERRORS as error:
            raise_refused(error)
    except DBAPIError:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the caller's to see
        return ChangeResult(error=error)
