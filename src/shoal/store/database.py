"""What a kind of database must offer to one writer and several readers.

It also parses the URL that names a database.
"""

from __future__ import annotations

from typing import NoReturn, Protocol

from sqlalchemy import URL, Connection, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    IntegrityError,
    NotSupportedError,
    ProgrammingError,
)

from shoal.errors import Bug, StateError, StoreUnavailable

STATEMENT_ERRORS = (IntegrityError, DataError, ProgrammingError, NotSupportedError)
"""The database refused the statement and the connection still works.

After any other error of the driver (disk full, I/O error, connection lost) the state is unknown. SQLite, for
one, has then undone the whole transaction by itself.
"""


class Database(Protocol):
    term: int
    """The term of the control plane, counted from 1; 0 if no other control plane can lead."""
    chain_key: bytes
    """The key that chains the event log."""

    def connect_writer(self) -> Connection:
        """A connection whose transactions may write. Only one is in use at any time."""
        ...

    def connect_reader(self) -> Connection:
        """A connection that cannot write."""
        ...

    def begin_write(self, writer: Connection) -> None:
        """Begin a transaction in which no other process can append events.

        `Deposed`: another control plane has led since `term` was set. No transaction is begun.
        """
        ...

    def begin_read(self, reader: Connection) -> None:
        """Begin a transaction that sees one moment. `Deposed`: as in `begin_write`, at that moment."""
        ...

    def tidy(self, writer: Connection) -> None:
        """Do housekeeping between transactions. It may raise; stored data is safe either way."""
        ...

    def close(self) -> None:
        """Release what the database holds besides its connections."""
        ...


def drop(connection: Connection) -> None:
    """Close a connection whose state is unknown, without another statement to the database."""
    try:
        connection.invalidate()
        connection.close()
    except DBAPIError:
        return


def unavailable_error(error: BaseException) -> StoreUnavailable:
    """Return the error in the driver's own words, which say whether the disk is full or the
    server is away.
    """
    message = str(error.orig) if isinstance(error, DBAPIError) else str(error)
    first_line = message.strip().partition("\n")[0]
    return StoreUnavailable(
        f"the store is not available: {first_line}",
        hint="nothing was acknowledged; try again, or run `shoal doctor` where the control plane runs",
    )


def raise_refused(error: DBAPIError) -> NoReturn:
    """Raise a `Bug`: a refused statement is a mistake in the code that made it."""
    raise Bug(f"the store refused a change: {str(error.orig).strip()}") from error


def parse_url(url: str) -> URL:
    """Parse a database URL. `StateError`: the URL names no database."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise unknown_database(url.partition(":")[0]) from None
    return _with_psycopg(parsed) if parsed.get_backend_name() == "postgresql" else parsed


def _with_psycopg(url: URL) -> URL:
    return url.set(drivername="postgresql+psycopg")


def unknown_database(kind: str) -> StateError:
    """Name only the kind: the rest of a URL may hold a password."""
    return StateError(
        f"cannot keep state in a `{kind}` database without a path or server",
        hint="use sqlite:////path/to/shoal.db or postgresql+psycopg://user@host/name",
    )
