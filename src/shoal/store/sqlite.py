"""SQLite: write-ahead log, every commit synced, one writer.

SQLite before 3.51.3 can corrupt a write-ahead log when two connections write or checkpoint at once.
So one process holds a lock beside the file, one connection writes and checkpoints, and readers open
the file read-only.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Connection, Engine, NullPool, create_engine

from shoal.errors import StateError, StoreUnavailable
from shoal.store.prepared import Session

BUSY_S = 5.0
"""How long to wait for a stranger, such as a shell or a backup, that holds the file."""
MAX_LOG_BYTES = 64 << 20
"""What the write-ahead log may keep on disk once it is empty."""


class SqliteDatabase:
    """Opening it takes the lock; `StateError` names the process that has it."""

    term = 0

    def __init__(self, path: Path) -> None:
        self._shared = path.with_name(f"{path.name}-shm")
        self._lock = _take_lock(path)
        self._writers = _engine(path, "rwc", _prepare_writer)
        self._readers = _engine(path, "ro", _prepare_reader)

    def connect_writer(self) -> Connection:
        return self._writers.connect()

    def connect_reader(self) -> Connection:
        return self._readers.connect()

    def begin_write(self, writer: Connection) -> None:
        self._refuse_frozen()
        begin(writer, "BEGIN IMMEDIATE")

    def begin_read(self, reader: Connection) -> None:
        self._refuse_frozen()
        begin(reader, "BEGIN")

    def _refuse_frozen(self) -> None:
        """Refuse while the disk takes no writes.

        Readers and writer mark their places in `-shm`, which SQLite maps into memory: if the kernel
        refuses such a mark it does so with SIGBUS, and the process is gone instead of an answer late.
        """
        if not os.access(self._shared, os.W_OK) and self._shared.exists():
            raise StoreUnavailable(
                "the store is not available: its disk is read-only",
                hint="see what the kernel says with `dmesg`",
            )

    def tidy(self, writer: Connection) -> None:
        """Move the log into the database file; the next write begins the log anew.

        The file of the log keeps its length, up to `MAX_LOG_BYTES`: a commit that writes over what is
        there syncs in half the time of one that makes the file longer.
        """
        driver = writer.connection.dbapi_connection
        assert driver is not None
        driver.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def close(self) -> None:
        self._writers.dispose()
        self._readers.dispose()
        os.close(self._lock)


def _engine(path: Path, mode: str, prepare: Callable[[sqlite3.Connection], None]) -> Engine:
    uri = f"{path.absolute().as_uri()}?mode={mode}"

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(uri, uri=True, timeout=BUSY_S, check_same_thread=False)
        prepare(connection)
        return connection

    return create_engine("sqlite://", creator=connect, poolclass=NullPool, hide_parameters=True)


def begin(connection: Connection, words: str) -> None:
    """Begin in our own words: the driver would do so late, and a listener costs every statement."""
    connection.begin()
    Session(connection).send(words)


def prepare(connection: sqlite3.Connection, *pragmas: str) -> None:
    """Take BEGIN and COMMIT into our own hands, and set what has to be set on every connection."""
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
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreUnavailable(
            f"cannot open the database {path}: {error.strerror}", hint=f"look at it with `ls -ld {path}`"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(lock, 20, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(lock)
        raise StateError(
            f"another control plane (pid {pid}) has the database {path} open",
            hint="stop it with `shoal down`",
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock
