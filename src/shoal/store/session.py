"""Statements compiled once for each kind of database and executed by the driver itself.

SQLAlchemy compiles a statement. Compiling it again for every row costs several times what the database takes
to run it. Only statements that live as long as the process belong here. A statement composed for a single
query goes through `query` and is not kept.

Records are JSON text: whole structs in a `body` column, beside the columns that are searched. Sets and
mappings are written in sorted order, so that one record has one text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, cast

import msgspec
from sqlalchemy import Connection, CursorResult, Dialect, Executable
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import ClauseElement

from shoal.model.attempt import Attempt
from shoal.model.job import Job
from shoal.model.node import Node, Window
from shoal.model.people import Project, Token, User
from shoal.model.service import Release, Replica, Service

Values = Mapping[str, Any]
NOTHING: Values = {}


class Cursor(Protocol):
    """The cursor of either driver."""

    rowcount: int

    def fetchone(self) -> tuple[Any, ...] | None: ...

    def fetchall(self) -> list[tuple[Any, ...]]: ...

    def __iter__(self) -> Iterator[tuple[Any, ...]]: ...


class PreparedStatement(NamedTuple):
    text: str
    bind: Callable[[Values], Any]
    """Turns values by name into what the driver takes."""


_PREPARED: dict[str, dict[Executable, PreparedStatement]] = {}
"""Prepared statements by name of the dialect. Two threads that prepare the same statement make the same
result.
"""


class Session:
    """Runs statements on one connection, inside a transaction that the caller begins and ends."""

    def __init__(self, connection: Connection) -> None:
        self.query: Callable[..., CursorResult[*tuple[Any, ...]]] = connection.execute
        """Run a query composed for a single use."""
        self._driver: Any = connection.connection.dbapi_connection
        self._dialect = connection.dialect
        self._prepared = _PREPARED.setdefault(connection.dialect.name, {})

    def run(self, statement: Executable, values: Values = NOTHING) -> Cursor:
        """Run a statement that is a constant of its module."""
        prepared = self._prepared.get(statement) or self._prepare(statement)
        return self.send(prepared.text, prepared.bind(values))

    def run_many(self, statement: Executable, rows: Iterable[Values]) -> None:
        """Run the statement once for each row, in one call if the driver can."""
        prepared = self._prepared.get(statement) or self._prepare(statement)
        try:
            self._driver.cursor().executemany(prepared.text, [prepared.bind(row) for row in rows])
        except self._dialect.loaded_dbapi.Error as error:
            raise self._wrapped(error, prepared.text) from error

    def value(self, statement: Executable, values: Values = NOTHING) -> Any:
        """The first column of the first row, or None without a row."""
        row = self.run(statement, values).fetchone()
        return None if row is None else row[0]

    def send(self, text: str, parameters: Any = ()) -> Cursor:
        """Run SQL in the driver's own form."""
        try:
            return cast("Cursor", self._driver.execute(text, parameters))
        except self._dialect.loaded_dbapi.Error as error:
            raise self._wrapped(error, text) from error

    def _prepare(self, statement: Executable) -> PreparedStatement:
        prepared = self._prepared[statement] = _compiled(statement, self._dialect)
        return prepared

    def _wrapped(self, error: Exception, text: str) -> BaseException:
        """The error as SQLAlchemy would raise it, so that callers catch one family of errors."""
        base = self._dialect.loaded_dbapi.Error
        wrapped = DBAPIError.instance(text, None, error, base, hide_parameters=True, dialect=self._dialect)
        return cast("BaseException", wrapped)


def _compiled(statement: Executable, dialect: Dialect) -> PreparedStatement:
    compiled: Any = cast("ClauseElement", statement).compile(dialect=dialect)
    fixed = {name: bound.value for name, bound in compiled.binds.items() if not bound.required}
    if compiled.positional:
        return PreparedStatement(compiled.string, _in_order(compiled.positiontup, fixed))
    return PreparedStatement(compiled.string, lambda values: {**fixed, **values})


def _in_order(names: Sequence[str], fixed: Values) -> Callable[[Values], tuple[Any, ...]]:
    if len(names) < 2:
        return lambda values: tuple([{**fixed, **values}[name] for name in names])
    pick = itemgetter(*names)
    return (lambda values: pick({**fixed, **values})) if fixed else pick


_encode = msgspec.json.Encoder(order="deterministic").encode


def encode(record: Any) -> str:
    return _encode(record).decode()


decode_job = msgspec.json.Decoder(Job).decode
decode_attempt = msgspec.json.Decoder(Attempt).decode
decode_node = msgspec.json.Decoder(Node).decode
decode_user = msgspec.json.Decoder(User).decode
decode_project = msgspec.json.Decoder(Project).decode
decode_token = msgspec.json.Decoder(Token).decode
decode_window = msgspec.json.Decoder(Window).decode
decode_service = msgspec.json.Decoder(Service).decode
decode_release = msgspec.json.Decoder(Release).decode
decode_replica = msgspec.json.Decoder(Replica).decode
decode_data = msgspec.json.Decoder(dict[str, Any]).decode
