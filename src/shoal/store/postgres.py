"""PostgreSQL through psycopg 3: one control plane, one writer connection.

The lock that keeps a second control plane out belongs to the session that writes. So there is no moment in
which one has lost the lock and can still commit: with the session goes the connection.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, event
from sqlalchemy.exc import OperationalError

from shoal.errors import StateError, StoreUnavailable

OWNER_LOCK = 0x53686F616C  # "Shoal"
OWNER_WAIT_MS = 3_000
"""A control plane that was killed a moment ago may still have a session that is about to end."""
LOCK_NOT_AVAILABLE = "55P03"
OWNER = """
SELECT activity.application_name FROM pg_locks JOIN pg_stat_activity AS activity USING (pid)
WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND (classid::bigint << 32) | objid::bigint = %(key)s
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
LOCK_TIMEOUT_MS = 10_000
DRIVER_OPTIONS = {
    "connect_timeout": 5,
    "tcp_user_timeout": 15_000,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
}
"""A server that vanished without a word is noticed in about half a minute, not in two hours."""
SERVER_OPTIONS = "SET tcp_keepalives_idle = 15; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3"
"""And so is a control plane's machine, by the server: until then its session keeps the lock."""


class PostgresDatabase:
    """`connect_writer` raises `StateError` when another control plane has the database.

    Once it was ours that is an interruption like any other, `StoreUnavailable`, until it is ours again.
    """

    def __init__(self, url: URL) -> None:
        self._has_owned = False
        self._writers = _engine(
            url,
            f"SET synchronous_commit = on; SET lock_timeout = {LOCK_TIMEOUT_MS}; SET timezone = 'UTC'; "
            f"{SERVER_OPTIONS}",
        )
        self._readers = _engine(
            url, "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY"
        )

    def connect_writer(self) -> Connection:
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
        writer.begin()
        # The session has it already. Taken again so that a dead session shows before a change is applied.
        writer.exec_driver_sql(f"SELECT pg_advisory_xact_lock({OWNER_LOCK})")

    def begin_read(self, reader: Connection) -> None:
        reader.begin()

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
            owner = writer.exec_driver_sql(OWNER, {"key": OWNER_LOCK}).scalar() or "unknown"
            kind = StoreUnavailable if self._has_owned else StateError
            raise kind(
                f"another control plane ({owner}) has this database open", hint="stop it with `shoal down`"
            ) from None


def _engine(url: URL, settings: str) -> Engine:
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
        connection.commit()

    event.listen(engine, "connect", prepare)
    return engine


def _own_name() -> str:
    """What the server, and a second control plane, call us. PostgreSQL keeps 63 bytes of it."""
    return f"shoal pid {os.getpid()} on {socket.gethostname()}"[:63]
