"""PostgreSQL through psycopg 3: one control plane leads, through one writer connection.

The lock that keeps a second control plane out belongs to the session that writes. So there is no moment in
which one has lost the lock and can still commit: with the session goes the connection. Whoever connects again
finds by the term whether another has led meanwhile; then what it knows is old, and it may do nothing with it.
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
"""A control plane that was killed a moment ago may still have a session that is about to end."""
LOCK_NOT_AVAILABLE = "55P03"
OWNER = """
SELECT activity.application_name FROM pg_locks JOIN pg_stat_activity AS activity USING (pid)
WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND (classid::bigint << 32) | objid::bigint = %(key)s
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
TERM = "control.term"
"""Its row of `meta` grows with every new leader, and is changed by whoever has the lock alone."""
OWN_TERM = f"(SELECT value FROM meta WHERE key = '{TERM}')"  # noqa: S608 - a constant of ours
LOCK_TIMEOUT_MS = 10_000
IDLE_TIMEOUT_MS = 15_000
"""A leader says something every second. One that was frozen, or whose machine was, says nothing: the server
ends its session, and another may lead."""
HAS_IDLE_TIMEOUT = 140_000
"""Versions of the server from this one on can."""
DRIVER_OPTIONS = {
    "connect_timeout": 5,
    "tcp_user_timeout": 15_000,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
}
"""A server that vanished without a word is noticed in about half a minute, not in two hours."""
SERVER_OPTIONS = (
    "SET tcp_keepalives_idle = 15; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3; "
    "SET tcp_user_timeout = 30000"
)
"""And so is a control plane's machine, by the server: until then its session keeps the lock."""


class PostgresDatabase:
    """`connect_writer` raises `StateError` when another control plane has the database.

    Once it was ours that is an interruption like any other, `StoreUnavailable`, until it is ours again. Once
    `term` is set it is `Deposed` as soon as another has led: from then on nothing is read or written here.
    """

    def __init__(self, url: URL, *, is_watched: bool = False) -> None:
        """`is_watched`: something is written every second; a session that is silent has lost its owner."""
        self.term = 0
        self.chain_key = b""
        self.on_deposed: Callable[[], None] | None = None
        """Called once, on whichever thread finds out."""
        self._is_deposed = False
        self._has_owned = False
        settings = (
            f"SET synchronous_commit = on; SET lock_timeout = {LOCK_TIMEOUT_MS}; SET timezone = 'UTC'; "
            f"{SERVER_OPTIONS}"
        )
        self._writers = connections(url, settings, is_watched=is_watched)
        self._readers = connections(
            url, "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY"
        )

    def connect_writer(self) -> Connection:
        self._refuse_if_deposed()
        writer = self._writers.connect()
        try:
            self._own(writer)
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
        # The session has it already. Taken again so that a dead session shows before a change is applied.
        lock = f"SELECT pg_advisory_xact_lock({OWNER_LOCK})"
        if self.term == 0:
            writer.exec_driver_sql(lock)
        else:
            self._check(writer, writer.exec_driver_sql(f"{lock}, {OWN_TERM}").one()[1])

    def begin_read(self, reader: Connection) -> None:
        """What is answered from here was so while this control plane led: a supervisor whose renewal was read
        about counts from before the next leader began to.
        """
        self._refuse_if_deposed()
        reader.begin()
        if self.term:
            self._check(reader, reader.exec_driver_sql(f"SELECT {OWN_TERM}").scalar())

    def tidy(self, writer: Connection) -> None:
        """Nothing to do: the server keeps its own house."""

    def close(self) -> None:
        self._writers.dispose()
        self._readers.dispose()

    def _own(self, writer: Connection) -> None:
        """Take the lock for as long as this session lives."""
        try:
            writer.exec_driver_sql(f"SET LOCAL lock_timeout = {OWNER_WAIT_MS}")
            writer.exec_driver_sql(f"SELECT pg_advisory_lock({OWNER_LOCK})")
            writer.commit()
        except OperationalError as error:
            if getattr(error.orig, "sqlstate", None) != LOCK_NOT_AVAILABLE:
                raise
            writer.rollback()
            if self.term:
                self._check(writer, writer.exec_driver_sql(f"SELECT {OWN_TERM}").scalar())
            owner = owner_of(writer) or "unknown"
            kind = StoreUnavailable if self._has_owned else AlreadyLed
            raise kind(
                f"another control plane ({owner}) has this database open",
                hint="stop it with `shoal down`, or stand by for it: `shoal up --shared DIR`",
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
                f"another control plane leads since term {self.term}", hint="ask again, and it will answer"
            )


def owner_of(connection: Connection) -> str | None:
    """Which session has the lock, by its name; None if nobody has."""
    found: str | None = connection.exec_driver_sql(OWNER, {"key": OWNER_LOCK}).scalar()
    return found


def connections(url: URL, settings: str, *, is_watched: bool = False) -> Engine:
    """Where connections with these settings come from. Nothing is opened yet."""
    try:
        engine = create_engine(
            url,
            poolclass=NullPool,
            hide_parameters=True,
            connect_args={**DRIVER_OPTIONS, "application_name": _own_name()},
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


def _own_name() -> str:
    """What the server, and a second control plane, call us. PostgreSQL keeps 63 bytes of it."""
    return f"shoal pid {os.getpid()} on {socket.gethostname()}"[:63]
