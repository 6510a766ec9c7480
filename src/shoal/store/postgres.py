"""PostgreSQL through psycopg 3: one control plane leads, through one writer connection.

The lock that keeps a second control plane out belongs to the session that writes. So a control plane that has
lost the lock cannot commit, because the connection ends with the session. A control plane that connects again
reads the term and learns whether another one has led meanwhile. If so, its knowledge is old and it may not
act on it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, event
from sqlalchemy.exc import OperationalError

from shoal.errors import AlreadyLed, Deposed, StateError, StoreUnavailable

OWNER_LOCK = 0x53686F616C  # "Shoal"
OWNER_WAIT_MS = 3_000
"""Wait this long for a control plane that was killed a moment ago: its session may be about to end."""
LOCK_NOT_AVAILABLE = "55P03"
OWNER = """
SELECT activity.application_name FROM pg_locks JOIN pg_stat_activity AS activity USING (pid)
WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND (classid::bigint << 32) | objid::bigint = %(key)s
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
TERM = "control.term"
"""The row of `meta` with the term. It grows with every new leader. Only the holder of the lock changes it."""
CURRENT_TERM = f"(SELECT value FROM meta WHERE key = '{TERM}')"  # noqa: S608 - a constant of ours
LOCK_TIMEOUT_MS = 10_000
IDLE_TIMEOUT_MS = 15_000
"""A leader writes every second. If it or its machine is frozen, the server ends its session after this time,
and another control plane may lead.
"""
HAS_IDLE_TIMEOUT = 140_000
"""Server versions from this one on support an idle timeout."""
DRIVER_OPTIONS = {
    "connect_timeout": 5,
    "tcp_user_timeout": 15_000,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
}
"""The client detects a vanished server in about half a minute, not in two hours."""
SERVER_OPTIONS = (
    "SET tcp_keepalives_idle = 15; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3; "
    "SET tcp_user_timeout = 30000"
)
"""The server detects a vanished control plane in the same way. Until then the session keeps the lock."""


class PostgresDatabase:
    """`connect_writer` raises `StateError` if another control plane has the database.

    Once this control plane has had the database, that is an interruption like any other: `StoreUnavailable`
    until the database is ours again. Once `term` is set, it is `Deposed` as soon as another control plane has
    led. From then on nothing is read or written here.
    """

    def __init__(self, url: URL, *, is_watched: bool = False) -> None:
        """`is_watched`: the leader writes every second, so a silent session has lost its owner."""
        self.term = 0
        self.chain_key = b""
        self.on_deposed: Callable[[], None] | None = None
        """Called once, on the thread that detects it."""
        self._is_deposed = False
        self._has_owned = False
        settings = (
            f"SET synchronous_commit = on; SET lock_timeout = {LOCK_TIMEOUT_MS}; SET timezone = 'UTC'; "
            f"{SERVER_OPTIONS}"
        )
        self._writers = create_postgres_engine(url, settings, is_watched=is_watched)
        self._readers = create_postgres_engine(
            url, "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY"
        )

    def connect_writer(self) -> Connection:
        self._refuse_if_deposed()
        writer = self._writers.connect()
        try:
            self._take_lock(writer)
        except BaseException:
            writer.close()
            raise
        self._has_owned = True
        return writer

    def connect_reader(self) -> Connection:
        return self._readers.connect()

    def begin_write(self, writer: Connection) -> None:
        self._refuse_if_deposed()
        writer.begin()
        # The session has the lock already. Taking it again reveals a dead session before a change is applied.
        lock = f"SELECT pg_advisory_xact_lock({OWNER_LOCK})"
        if self.term == 0:
            writer.exec_driver_sql(lock)
        else:
            self._check(writer, writer.exec_driver_sql(f"{lock}, {CURRENT_TERM}").one()[1])

    def begin_read(self, reader: Connection) -> None:
        """Begin a transaction and check the term. Every answer was true while this control plane led, so a
        supervisor's renewal that was read counts from before the next leader's term.
        """
        self._refuse_if_deposed()
        reader.begin()
        if self.term:
            self._check(reader, reader.exec_driver_sql(f"SELECT {CURRENT_TERM}").scalar())

    def tidy(self, writer: Connection) -> None:
        """Do nothing: the server does its own housekeeping."""

    def close(self) -> None:
        self._writers.dispose()
        self._readers.dispose()

    def _take_lock(self, writer: Connection) -> None:
        """Take the lock for the life of this session."""
        try:
            writer.exec_driver_sql(f"SET LOCAL lock_timeout = {OWNER_WAIT_MS}")
            writer.exec_driver_sql(f"SELECT pg_advisory_lock({OWNER_LOCK})")
            writer.commit()
        except OperationalError as error:
            if getattr(error.orig, "sqlstate", None) != LOCK_NOT_AVAILABLE:
                raise
            writer.rollback()
            if self.term:
                self._check(writer, writer.exec_driver_sql(f"SELECT {CURRENT_TERM}").scalar())
            owner = lock_holder(writer) or "unknown"
            kind = StoreUnavailable if self._has_owned else AlreadyLed
            raise kind(
                f"another control plane ({owner}) has this database open",
                hint="stop it with `shoal down`, or start a standby: `shoal up --shared DIR`",
            ) from None

    def _check(self, connection: Connection, term: str | None) -> None:
        if term == str(self.term):
            return
        connection.rollback()
        is_news, self._is_deposed = not self._is_deposed, True
        if is_news and self.on_deposed is not None:
            self.on_deposed()
        self._refuse_if_deposed()

    def _refuse_if_deposed(self) -> None:
        if self._is_deposed:
            raise Deposed(
                f"another control plane leads since term {self.term}",
                hint="ask again; the leader will answer",
            )


def lock_holder(connection: Connection) -> str | None:
    """The name of the session that has the lock, or None."""
    holder: str | None = connection.exec_driver_sql(OWNER, {"key": OWNER_LOCK}).scalar()
    return holder


def create_postgres_engine(url: URL, settings: str, *, is_watched: bool = False) -> Engine:
    """The factory of connections with these settings. Opens nothing."""
    try:
        engine = create_engine(
            url,
            poolclass=NullPool,
            hide_parameters=True,
            connect_args={**DRIVER_OPTIONS, "application_name": _application_name()},
        )
    except ModuleNotFoundError as error:
        raise StateError(
            f"the PostgreSQL driver is not installed ({error.name})", hint="pip install 'shoal[postgres]'"
        ) from error

    def prepare(connection: Any, record: object) -> None:
        connection.execute(settings)
        if is_watched:
            connection.execute(f"SET idle_in_transaction_session_timeout = {IDLE_TIMEOUT_MS}")
            if connection.info.server_version >= HAS_IDLE_TIMEOUT:
                connection.execute(f"SET idle_session_timeout = {IDLE_TIMEOUT_MS}")
        connection.commit()

    event.listen(engine, "connect", prepare)
    return engine


def _application_name() -> str:
    """The name under which the server, and a second control plane, see us. PostgreSQL keeps 63
    bytes of it.
    """
    return f"shoal pid {os.getpid()} on {socket.gethostname()}"[:63]
