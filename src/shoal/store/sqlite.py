"""SQLite: write-ahead log, every commit synced, one writer.

SQLite before 3.51.3 can corrupt a write-ahead log when two connections write or checkpoint at once. So one
process holds a lock beside the file, one connection writes and checkpoints, and readers open the file
read-only.

Connections mark their positions in an index of the log. By default SQLite maps this index from a file beside
the database. If that disk has just gone read-only, marking raises SIGBUS, which ends the process in place of
an error. So the index is in memory (`unix-excl`), and while it is open no other process can so much as read
the database.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Connection, Engine, NullPool, create_engine
from sqlalchemy.exc import OperationalError

from shoal.errors import StateError, StoreUnavailable
from shoal.store.session import Session

BUSY_S = 5.0
"""Seconds to wait for another process, such as a shell or a backup, that holds the file."""
MAX_LOG_BYTES = 64 << 20
"""Bytes of disk that the empty write-ahead log may keep."""


class SqliteDatabase:
    """Opening it takes the lock. `StateError` names the process that has it."""

    term = 0
    chain_key = b""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = _take_lock(path)
        self._writers = _engine(path, "rwc", _prepare_writer)
        self._readers = _engine(path, "ro", _prepare_reader)
        self._holder: Connection | None = None

    def connect_writer(self) -> Connection:
        """The first call locks the database for this process. `StateError`: another process has it open."""
        if self._holder is None:
            self._holder = self._hold()
        return self._writers.connect()

    def _hold(self) -> Connection:
        """Open a connection that only stays open. SQLite has one index per process, made by its first
        connection.

        If a reader were first, after an error that closed all other connections, the index would be a file
        again.
        """
        try:
            return self._writers.connect()
        except OperationalError as error:
            if getattr(error.orig, "sqlite_errorcode", None) != sqlite3.SQLITE_BUSY:
                raise
            raise StateError(
                f"another process has the database {self._path} open, such as a shell or a backup",
                hint=f"see which with `fuser -v {self._path}`, and end it",
            ) from error

    def connect_reader(self) -> Connection:
        return self._readers.connect()

    def begin_write(self, writer: Connection) -> None:
        # SQLite would refuse, too, but call it an I/O error.
        if not os.access(self._path, os.W_OK):
            raise StoreUnavailable(
                "the store is not available: its disk is read-only",
                hint="read the kernel's messages with `dmesg`",
            )
        begin(writer, "BEGIN IMMEDIATE")

    def begin_read(self, reader: Connection) -> None:
        begin(reader, "BEGIN")

    def tidy(self, writer: Connection) -> None:
        """Move the log into the database file. The next write begins the log from its start.

        The log's file keeps its length, up to `MAX_LOG_BYTES`: a commit that overwrites existing bytes syncs
        in half the time of one that makes the file longer.
        """
        driver = writer.connection.dbapi_connection
        assert driver is not None
        driver.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def close(self) -> None:
        if self._holder is not None:
            self._holder.close()
        self._writers.dispose()
        self._readers.dispose()
        os.close(self._lock)


def _engine(path: Path, mode: str, prepare: Callable[[sqlite3.Connection], None]) -> Engine:
    uri = f"{path.absolute().as_uri()}?mode={mode}&vfs=unix-excl"

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(uri, uri=True, timeout=BUSY_S, check_same_thread=False)
        prepare(connection)
        return connection

    return create_engine("sqlite://", creator=connect, poolclass=NullPool, hide_parameters=True)


def begin(connection: Connection, statement: str) -> None:
    """Begin a transaction explicitly. The driver would begin it late, and a listener costs
    every statement.
    """
    connection.begin()
    Session(connection).send(statement)


def prepare(connection: sqlite3.Connection, *pragmas: str) -> None:
    """Leave BEGIN and COMMIT to us, and set what every connection needs."""
    connection.isolation_level = None
    for pragma in pragmas:
        connection.execute(f"PRAGMA {pragma}").fetchall()


def _prepare_writer(connection: sqlite3.Connection) -> None:
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise StateError(
            f"SQLite cannot keep a write-ahead log here (it offers `{mode}`); is this a network disk?",
            hint="set SHOAL_HOME to a directory on a local disk, or use PostgreSQL",
        )
    prepare(
        connection,
        "synchronous = FULL",
        "wal_autocheckpoint = 0",
        f"journal_size_limit = {MAX_LOG_BYTES}",
        "cache_size = -16000",
        "temp_store = MEMORY",
    )


def _prepare_reader(connection: sqlite3.Connection) -> None:
    prepare(
        connection, "query_only = ON", "wal_autocheckpoint = 0", "cache_size = -8000", "temp_store = MEMORY"
    )


def _take_lock(path: Path) -> int:
    """Lock `<path>.lock` for the life of this process, write our pid into it, make the file private."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = _open_private(f"{path}.lock")
    except OSError as error:
        raise _cannot_open(path, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(lock, 20, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(lock)
        raise StateError(
            f"another control plane (pid {pid}) has the database {path} open",
            hint="stop it with `shoal down`",
        ) from None
    try:
        # Only after the lock is ours. A process that closes a file loses all POSIX locks it has on that file,
        # including those of a SQLite that has it open.
        os.close(_open_private(path))
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        os.close(lock)
        raise _cannot_open(path, error) from error
    return lock


def _open_private(path: Path | str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _cannot_open(path: Path, error: OSError) -> StoreUnavailable:
    message = f"cannot open the database {path}: {error.strerror}"
    return StoreUnavailable(message, hint=f"look at it with `ls -ld {path}`")
