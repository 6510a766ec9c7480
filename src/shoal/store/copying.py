"""Copy a live database of any kind to a SQLite file and back, as of one moment.

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
from shoal.store.base import LogHead
from shoal.store.database import parse_url, unavailable_error
from shoal.store.migrations import migrate
from shoal.store.postgres import SERVER_OPTIONS, create_postgres_engine
from shoal.store.schema import metadata
from shoal.store.sqlite import SqliteDatabase
from shoal.store.transaction import Tx

PAGES = 256
"""Pages per step of the copy: 1 MiB. Nothing is locked between steps, and writers never wait."""
ROWS = 500
PROJECT_UID = "SELECT uid FROM jobs JOIN projects ON projects.name = jobs.project WHERE job_id = ?"
OnProgress = Callable[[int, int], None]
"""Takes the amount done and the total."""


def copy_sqlite(
    reader: Connection, target: Path, on_progress: OnProgress = lambda _done, _all: None
) -> LogHead:
    """Copy what the reader's transaction sees, page by page. Return the newest event of the copy.

    `StoreUnavailable`: the disk does not take the copy. Nothing is left at `target`.
    """
    source = reader.connection.dbapi_connection
    assert source is not None
    # The first read fixes the moment: SQLite begins a transaction without one.
    head = Tx(reader).events.head()
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        with contextlib.closing(sqlite3.connect(target)) as copy, target.open("rb") as written:
            # Pages go to the file as they come. A copy that was cut short is thrown away.
            for pragma in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -512"):
                copy.execute(f"PRAGMA {pragma}").fetchall()

            def progress(_status: int, left: int, of: int) -> None:
                # Sync in small pieces. Otherwise the writer's next commit waits until the disk has taken the
                # whole copy.
                os.fdatasync(written.fileno())
                on_progress(of - left, of)

            source.backup(copy, pages=PAGES, progress=progress)
            # Make it one file: a copy with a log beside it may lose the log.
            copy.execute("PRAGMA journal_mode = DELETE").fetchall()
        _sync(target)
    except sqlite3.Error as error:
        target.unlink(missing_ok=True)
        message = f"the database could not be copied to {target}: {error}"
        raise StoreUnavailable(message, hint=f"df -h {target.parent}") from error
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return head


def copy_stopped_sqlite(path: Path, target: Path, on_progress: OnProgress) -> LogHead:
    """Copy the database of a stopped control plane. `StateError`: the control plane is running."""
    database = SqliteDatabase(path)
    try:
        database.connect_writer().close()
        with database.connect_reader() as reader:
            database.begin_read(reader)
            return copy_sqlite(reader, target, on_progress)
    except DBAPIError as error:
        raise unavailable_error(error) from error
    finally:
        database.close()


def copy_postgres(url: str, target: Path, on_progress: OnProgress) -> LogHead:
    """Copy every table, as of one moment, into a new SQLite file. Takes no lock and blocks no writer."""
    engine = create_postgres_engine(parse_url(url), SERVER_OPTIONS)
    try:
        with engine.connect().execution_options(
            isolation_level="REPEATABLE READ", postgresql_readonly=True, stream_results=True
        ) as source:
            with _new_sqlite(target) as copy:
                _copy_rows(source, copy, on_progress)
            return Tx(source).events.head()
    except DBAPIError as error:
        target.unlink(missing_ok=True)
        raise unavailable_error(error) from error
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    finally:
        engine.dispose()


def load_postgres(source: Path, url: str, on_progress: OnProgress) -> None:
    """Fill an empty PostgreSQL database, all or nothing. `StateError`: the database is not empty."""
    engine = create_postgres_engine(parse_url(url), SERVER_OPTIONS)
    database = SqliteDatabase(source)
    try:
        database.connect_writer().close()
        with database.connect_reader() as reader, engine.begin() as target:
            database.begin_read(reader)
            if inspect(target).get_table_names():
                raise StateError(
                    "the target database of the restore is not empty",
                    hint="make a new one with `createdb NAME`, and give it with `--database`",
                )
            migrate(target)
            _copy_rows(reader, target, on_progress)
    except DBAPIError as error:
        raise unavailable_error(error) from error
    finally:
        database.close()
        engine.dispose()


def project_uids(copy: Path, job_ids: Iterable[str]) -> dict[str, int]:
    """Return the Unix user of each job's project, for the jobs that this SQLite copy knows."""
    with contextlib.closing(sqlite3.connect(f"{copy.absolute().as_uri()}?mode=ro", uri=True)) as database:
        rows = {job_id: database.execute(PROJECT_UID, (job_id,)).fetchone() for job_id in job_ids}
    return {job_id: row[0] for job_id, row in rows.items() if row is not None}


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


def _copy_rows(source: Connection, target: Connection, on_progress: OnProgress) -> None:
    """Copy the rows of every table. Both databases must have the tables of the same revision."""
    theirs, ours = (_revision(connection) for connection in (source, target))
    if theirs != ours:
        raise StateError(
            f"the database has revision {theirs}, and this Shoal writes {ours}",
            hint="use the Shoal that last ran on it, or `shoal up` once with this one",
        )
    tables = metadata.sorted_tables
    for number, table in enumerate(tables):
        for part in source.execute(select(table)).mappings().partitions(ROWS):
            target.execute(insert(table), [dict(row) for row in part])
        on_progress(number + 1, len(tables))


def _revision(connection: Connection) -> str | None:
    revision: str | None = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
    return revision


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
