"""What a kind of database must offer so that one writer and several readers can live on it."""

from __future__ import annotations

from typing import NoReturn, Protocol

from sqlalchemy import Connection
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, NotSupportedError, ProgrammingError

from shoal.errors import Bug, StoreUnavailable

OWN_FAULT = (IntegrityError, DataError, ProgrammingError, NotSupportedError)
"""The statement was refused and the connection is as good as before.

After any other error of the driver (disk full, I/O error, connection lost) nothing is known: SQLite,
for one, has then undone the whole transaction by itself.
"""


class Database(Protocol):
    term: int
    """Whose control plane's time it is, counted from 1; 0 where no other can ever have it."""
    chain_key: bytes
    """What the event log is chained with."""

    def connect_writer(self) -> Connection:
        """A connection whose transactions may write. Only one is in use at any time."""
        ...

    def connect_reader(self) -> Connection:
        """A connection that cannot write."""
        ...

    def begin_write(self, writer: Connection) -> None:
        """Begin a transaction in which no other process can append events.

        `Deposed`: another control plane has led since `term` was set. Nothing is begun.
        """
        ...

    def begin_read(self, reader: Connection) -> None:
        """Begin a transaction that sees one moment. `Deposed` as for `begin_write`, by that moment."""
        ...

    def tidy(self, writer: Connection) -> None:
        """Housekeeping between transactions. May raise; what is stored is safe either way."""
        ...

    def close(self) -> None:
        """Give up whatever is held beside connections."""
        ...


def drop(connection: Connection) -> None:
    """Close a connection whose state is unknown, without another word to the database."""
    try:
        connection.invalidate()
        connection.close()
    except DBAPIError:
        return


def unavailable(error: BaseException) -> StoreUnavailable:
    """In the driver's own words: it knows whether the disk is full or the server away."""
    told = str(error.orig) if isinstance(error, DBAPIError) else str(error)
    first_line = told.strip().partition("\n")[0]
    return StoreUnavailable(
        f"the store is not available: {first_line}",
        hint="nothing was acknowledged; try again, or run `shoal doctor` where the control plane runs",
    )


def refused(error: DBAPIError) -> NoReturn:
    """A statement the database would not take is a mistake in the code that made it."""
    raise Bug(f"the store refused a change: {str(error.orig).strip()}") from error
