"""Statements compiled once for each kind of database and run on the driver itself.

SQLAlchemy says what a statement is; having it say so anew for every row costs several times what the
database takes to run it. Only statements that live as long as the process belong here: one composed
for a single question goes through `ask`, and is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, cast

from sqlalchemy import Connection, CursorResult, Dialect, Executable
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import ClauseElement

Values = Mapping[str, Any]
NOTHING: Values = {}


class Cursor(Protocol):
    """What both drivers give back."""

    rowcount: int

    def fetchone(self) -> tuple[Any, ...] | None: ...

    def fetchall(self) -> list[tuple[Any, ...]]: ...

    def __iter__(self) -> Iterator[tuple[Any, ...]]: ...


class Prepared(NamedTuple):
    text: str
    bind: Callable[[Values], Any]
    """From values by name to what the driver takes."""


_PREPARED: dict[str, dict[Executable, Prepared]] = {}
"""By name of the dialect. Two threads that prepare the same statement make the same thing."""


class Session:
    """One connection's way to run statements, inside a transaction that somebody else begins and ends."""

    def __init__(self, connection: Connection) -> None:
        self.ask: Callable[..., CursorResult[*tuple[Any, ...]]] = connection.execute
        """Run a query composed for this one question."""
        self._driver: Any = connection.connection.dbapi_connection
        self._dialect = connection.dialect
        self._prepared = _PREPARED.setdefault(connection.dialect.name, {})

    def run(self, statement: Executable, values: Values = NOTHING) -> Cursor:
        """Run a statement that is a constant of its module."""
        prepared = self._prepared.get(statement) or self._prepare(statement)
        return self.send(prepared.text, prepared.bind(values))

    def run_many(self, statement: Executable, rows: Iterable[Values]) -> None:
        """Run it once for each row, as far as the driver can in one go."""
        prepared = self._prepared.get(statement) or self._prepare(statement)
        try:
            self._driver.cursor().executemany(prepared.text, [prepared.bind(row) for row in rows])
        except self._dialect.loaded_dbapi.Error as error:
            raise self._wrapped(error, prepared.text) from error

    def value(self, statement: Executable, values: Values = NOTHING) -> Any:
        """The first column of the first row; None when there is no row."""
        row = self.run(statement, values).fetchone()
        return None if row is None else row[0]

    def send(self, text: str, parameters: Any = ()) -> Cursor:
        """Run SQL as the driver takes it."""
        try:
            return cast("Cursor", self._driver.execute(text, parameters))
        except self._dialect.loaded_dbapi.Error as error:
            raise self._wrapped(error, text) from error

    def _prepare(self, statement: Executable) -> Prepared:
        prepared = self._prepared[statement] = _compiled(statement, self._dialect)
        return prepared

    def _wrapped(self, error: Exception, text: str) -> BaseException:
        """As SQLAlchemy would raise it, so that there is one family of errors to catch."""
        base = self._dialect.loaded_dbapi.Error
        wrapped = DBAPIError.instance(text, None, error, base, hide_parameters=True, dialect=self._dialect)
        return cast("BaseException", wrapped)


def _compiled(statement: Executable, dialect: Dialect) -> Prepared:
    compiled: Any = cast("ClauseElement", statement).compile(dialect=dialect)
    fixed = {name: bound.value for name, bound in compiled.binds.items() if not bound.required}
    if compiled.positional:
        return Prepared(compiled.string, _in_order(compiled.positiontup, fixed))
    return Prepared(compiled.string, lambda values: {**fixed, **values})


def _in_order(names: Sequence[str], fixed: Values) -> Callable[[Values], tuple[Any, ...]]:
    if len(names) < 2:
        return lambda values: tuple([{**fixed, **values}[name] for name in names])
    pick = itemgetter(*names)
    return (lambda values: pick({**fixed, **values})) if fixed else pick
