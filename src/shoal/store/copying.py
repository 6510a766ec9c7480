"""Copy a database of any kind to a SQLite file and back, as of one moment, while it is written to.

The tables are the same on SQLite and PostgreSQL, so a backup of either is one SQLite file of the same schema.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from sqlalchemy import Connection, insert, inspect, select
from sqlalchemy.exc import DBAPIError

from shoal.errors import StateError, StoreUnavailable
from shoal.store.base import Head
from shoal.store.database import unavailable
from shoal.store.migrations import migrate
from shoal.store.postgres import SERVER_OPTIONS, connections
from shoal.store.schema import metadata
from shoal.store.sqlite import SqliteDatabase
from shoal.store.transaction import Tx
from shoal.store.urls import parse_url

PAGES = 256
"""Copied at a time: 1 MiB. Nothing is locked in between, and writers never wait."""
ROWS = 500
PROJECT_UID = "SELECT uid FROM jobs JOIN projects ON projects.name = jobs.project WHERE job_id = ?"
Tell = Callable[[int, int], None]
"""Takes how much is done, and of how much."""


def copy_sqlite(reader: Connection, target: Path, tell: Tell = lambda _done, _all: None) -> Head:
    """Copy what the reader's transaction sees, page by page. Returns the newest event of the copy.

    `StoreUnavailable`: the disk does not take it; nothing is left at `target`.
    """
    source = reader.connection.dbapi_connection
    assert source is not None
    # The first read is what fixes the moment: SQLite begins a transaction without one.
    head = Tx(reader).events.head()
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        with contextlib.closing(sqlite3.connect(target)) as copy, target.open("rb") as written:
            # Its pages go to the file as they come; a copy that was cut short is thrown away.
            for pragma in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -512"):
                copy.execute(f"PRAGMA {pragma}").fetchall()

            def progress(_status: int, left: int, of: int) -> None:
                # Little at a time: else the writer's next commit waits for the disk to take all of the copy.
                os.fdatasync(written.fileno())
                tell(of - left, of)

            source.backup(copy, pages=PAGES, progress=progress)
            # One file: a copy that has a log beside it may lose it.
            copy.execute("PRAGMA journal_mode = DELETE").fetchall()
        _sync(target)
    except sqlite3.Error as error:
        target.unlink(missing_ok=True)
        told = f"the database could not be copied to {target}: {error}"
        raise StoreUnavailable(told, hint=f"df -h {target.parent}") from error
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return head


def copy_of_sqlite(path: Path, target: Path, tell: Tell) -> Head:
    """Copy the database of a control plane that is down. `StateError`: it is up."""
    database = SqliteDatabase(path)
    try:
        database.connect_writer().close()
        with database.connect_reader() as reader:
            database.begin_read(reader)
            return copy_sqlite(reader, target, tell)
    except DBAPIError as error:
        raise unavailable(error) from error
    finally:
        database.close()


def copy_of_postgres(url: str, target: Path, tell: Tell) -> Head:
    """Copy every table, as of one moment, into a new SQLite file. Takes no lock and holds up nobody."""
    engine = connections(parse_url(url), SERVER_OPTIONS)
    try:
        with engine.connect().execution_options(
            isolation_level="REPEATABLE READ", postgresql_readonly=True, stream_results=True
        ) as source:
            with _new_sqlite(target) as copy:
                _copy_rows(source, copy, tell)
            return Tx(source).events.head()
    except DBAPIError as error:
        target.unlink(missing_ok=True)
        raise unavailable(error) from error
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    finally:
        engine.dispose()


def load_postgres(source: Path, url: str, tell: Tell) -> None:
    """Fill an empty PostgreSQL database, all or nothing. `StateError`: there is something in it."""
    engine = connections(parse_url(url), SERVER_OPTIONS)
    database = SqliteDatabase(source)
    try:
        database.connect_writer().close()
        with database.connect_reader() as reader, engine.begin() as target:
            database.begin_read(reader)
            if inspect(target).get_table_names():
                raise StateError(
                    "the database to restore to is not empty",
                    hint="make a new one with `createdb NAME`, and give it with `--database`",
                )
            migrate(target)
            _copy_rows(reader, target, tell)
    except DBAPIError as error:
        raise unavailable(error) from error
    finally:
        database.close()
        engine.dispose()


def project_uids(copy: Path, job_ids: Iterable[str]) -> dict[str, int]:
    """Return the Unix user of each job's project, for the jobs that this SQLite copy knows."""
    with contextlib.closing(sqlite3.connect(f"{copy.absolute().as_uri()}?mode=ro", uri=True)) as database:
        found = {job_id: database.execute(PROJECT_UID, (job_id,)).fetchone() for job_id in job_ids}
    return {job_id: row[0] for job_id, row in found.items() if row is not None}


@contextlib.contextmanager
def _new_sqlite(target: Path) -> Iterator[Connection]:
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    database = SqliteDatabase(target)
    try:
        with database.connect_writer() as copy:
            database.begin_write(copy)
            migrate(copy)
            yield copy
            copy.commit()
    finally:
        database.close()
    with contextlib.closing(sqlite3.connect(target)) as copied:
        copied.execute("PRAGMA journal_mode = DELETE").fetchall()
    Path(f"{target}.lock").unlink(missing_ok=True)
    _sync(target)


def _copy_rows(source: Connection, target: Connection, tell: Tell) -> None:
    """Both have the tables of the same revision."""
    theirs, ours = (_revision(one) for one in (source, target))
    if theirs != ours:
        raise StateError(
            f"the database has revision {theirs}, and this Shoal writes {ours}",
            hint="use the Shoal that last ran on it, or `shoal up` once with this one",
        )
    tables = metadata.sorted_tables
    for number, table in enumerate(tables):
        for part in source.execute(select(table)).mappings().partitions(ROWS):
            target.execute(insert(table), [dict(row) for row in part])
        tell(number + 1, len(tables))


def _revision(connection: Connection) -> str | None:
    found: str | None = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
    return found


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
