"""PostgreSQL through psycopg 3: one writer connection, an advisory lock around the event chain."""

from __future__ import annotations

from typing import Any

from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, event

from shoal.errors import StateError

CHAIN_LOCK = 0x53686F616C  # "Shoal"
LOCK_TIMEOUT_MS = 10_000
DRIVER_OPTIONS = {
    "connect_timeout": 5,
    "tcp_user_timeout": 15_000,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "application_name": "shoal",
}
"""A server that vanished without a word is noticed in about half a minute, not in two hours."""


class PostgresDatabase:
    def __init__(self, url: URL) -> None:
        self._writers = _engine(
            url, f"SET synchronous_commit = on; SET lock_timeout = {LOCK_TIMEOUT_MS}; SET timezone = 'UTC'"
        )
        self._readers = _engine(
            url, "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY"
        )

    def connect_writer(self) -> Connection:
        return self._writers.connect()

    def connect_reader(self) -> Connection:
        return self._readers.connect()

    def begin_write(self, writer: Connection) -> None:
        writer.begin()
        writer.exec_driver_sql(f"SELECT pg_advisory_xact_lock({CHAIN_LOCK})")

    def begin_read(self, reader: Connection) -> None:
        reader.begin()

    def tidy(self, writer: Connection) -> None:
        """Nothing to do: the server keeps its own house."""

    def close(self) -> None:
        self._writers.dispose()
        self._readers.dispose()


def _engine(url: URL, settings: str) -> Engine:
    try:
        engine = create_engine(
            url, poolclass=NullPool, hide_parameters=True, connect_args=dict(DRIVER_OPTIONS)
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
