"""SQLite's file: which processes may open it and write it, and how its log is kept short."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest
from sqlalchemy.exc import OperationalError

from shoal.clock import SystemClock
from shoal.errors import StateError, StoreUnavailable
from shoal.store import open_store
from shoal.store.sqlite import SqliteDatabase
from tests.support.store_records import submit

HOLD = """
import sys
from shoal.clock import SystemClock
from shoal.store import open_store
store = open_store(sys.argv[1], clock=SystemClock())
print("open", flush=True)
sys.stdin.read()
"""


def _url(path: Path) -> str:
    return f"sqlite:///{path}"


def test_second_control_plane_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    url = _url(tmp_path / "shoal.db")
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"open\n"
        with pytest.raises(StateError, match=rf"pid {first.pid}\b") as caught:
            open_store(url, clock=SystemClock())
        assert caught.value.hint == "stop it with `shoal down`"
        first.kill()
    anyio.run(open_store(url, clock=SystemClock()).close)


ASK = """
import sqlite3
import sys
stranger = sqlite3.connect(sys.argv[1], timeout=0)
try:
    print(stranger.execute("SELECT count(*) FROM jobs").fetchone()[0], flush=True)
except sqlite3.OperationalError as error:
    print(error, flush=True)
sys.stdin.read()
"""


@contextmanager
def _stranger(path: Path) -> Iterator[str]:
    """The output of another process that asks for the number of jobs. It stays until this context ends."""
    command = [sys.executable, "-c", ASK, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        yield other.stdout.readline().strip()
        other.communicate()


async def test_no_other_process_has_the_database_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "shoal.db"
    store = open_store(_url(path), clock=SystemClock())
    await store.write(lambda tx: submit(tx, 1))
    with _stranger(path) as output:
        assert output == "database is locked"
    await store.close()
    monkeypatch.setattr("shoal.store.sqlite.BUSY_S", 0.1)
    with _stranger(path) as output:
        assert output == "1"
        with pytest.raises(StateError, match="another process has the database") as caught:
            open_store(_url(path), clock=SystemClock())
        assert caught.value.hint == f"see which with `fuser -v {path}`, and end it"
    await open_store(_url(path), clock=SystemClock()).close()


async def test_second_open_in_the_same_process_is_refused_and_keeps_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "shoal.db"
    store = open_store(_url(path), clock=SystemClock())
    await store.write(lambda tx: submit(tx, 1))
    with pytest.raises(StateError, match="another control plane"):
        open_store(_url(path), clock=SystemClock())
    with _stranger(path) as output:
        assert output == "database is locked"
    await store.close()


def test_database_that_cannot_be_opened_is_not_locked(tmp_path: Path) -> None:
    path = tmp_path / "shoal.db"
    path.mkdir()
    with pytest.raises(StoreUnavailable, match="cannot open the database"):
        open_store(_url(path), clock=SystemClock())
    path.rmdir()
    anyio.run(open_store(_url(path), clock=SystemClock()).close)


def test_index_of_the_log_is_no_file_even_when_only_a_reader_is_left(tmp_path: Path) -> None:
    database = SqliteDatabase(tmp_path / "shoal.db")
    with database.connect_writer() as writer:
        writer.exec_driver_sql("CREATE TABLE t (a)")
    with database.connect_reader() as reader:
        assert reader.exec_driver_sql("SELECT count(*) FROM t").scalar() == 0
        assert not (tmp_path / "shoal.db-shm").exists()
    database.close()


async def test_closed_store_may_be_opened_again_and_remembers(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        store = open_store(_url(tmp_path / "shoal.db"), clock=SystemClock())
        assert await store.write(partial(submit, number=number)) == number
        await store.close()
    assert not (tmp_path / "shoal.db-wal").exists()


async def test_files_are_private(tmp_path: Path) -> None:
    home = tmp_path / "home"
    store = open_store(_url(home / "shoal.db"), clock=SystemClock())
    await store.write(lambda tx: submit(tx, 1))
    modes = {path.name: path.stat().st_mode & 0o777 for path in home.iterdir()}
    await store.close()
    assert home.stat().st_mode & 0o777 == 0o700
    assert modes == {f"shoal.db{suffix}": 0o600 for suffix in ("", "-wal", ".lock")}


def test_path_with_characters_of_a_url_is_the_path_that_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "a ?b#c%41.db"
    database = SqliteDatabase(path)
    with database.connect_writer() as connection:
        connection.exec_driver_sql("CREATE TABLE t (a)")
    database.close()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [path.name, f"{path.name}.lock"]


async def test_commit_is_synced_and_only_the_writer_can_write_or_checkpoint(tmp_path: Path) -> None:
    database = SqliteDatabase(tmp_path / "shoal.db")
    with database.connect_writer() as writer, database.connect_reader() as reader:
        settings = [("synchronous", 2), ("wal_autocheckpoint", 0), ("journal_mode", "wal")]
        for name, value in settings:
            assert writer.exec_driver_sql(f"PRAGMA {name}").scalar() == value
        assert reader.exec_driver_sql("PRAGMA query_only").scalar() == 1
        assert reader.exec_driver_sql("PRAGMA wal_autocheckpoint").scalar() == 0
        reader.exec_driver_sql("PRAGMA query_only = OFF")
        writer.exec_driver_sql("CREATE TABLE t (a)")
        for statement in ("CREATE TABLE u (a)", "PRAGMA wal_checkpoint(PASSIVE)"):
            with pytest.raises(OperationalError):
                reader.exec_driver_sql(statement)
    database.close()


async def test_log_is_moved_into_the_file_when_nothing_is_written_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.store.threads.IDLE_S", 0.05)
    store = open_store(_url(tmp_path / "shoal.db"), clock=SystemClock())
    await store.write(lambda tx: submit(tx, 1))
    deadline = time.monotonic() + 30
    while _num_jobs_without_the_log(tmp_path) != 1:
        assert time.monotonic() < deadline
        await anyio.sleep(0.01)
    length = (tmp_path / "shoal.db-wal").stat().st_size
    assert await store.write(lambda tx: submit(tx, 2)) == 2
    assert (tmp_path / "shoal.db-wal").stat().st_size == length, "it is written over, not made longer"
    await store.close()


def _num_jobs_without_the_log(home: Path) -> int:
    """The number of jobs in the database file, without its log."""
    copy = home / "copy.db"
    copy.write_bytes((home / "shoal.db").read_bytes())
    with closing(sqlite3.connect(f"file:{copy}?immutable=1", uri=True)) as alone:
        try:
            return int(alone.execute("SELECT count(*) FROM jobs").fetchone()[0])
        except sqlite3.DatabaseError:
            return 0  # copied half way, or before the tables


async def test_log_is_checkpointed_while_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.store.threads.TIDY_EVERY", 5)
    monkeypatch.setattr("shoal.store.threads.TIDY_AT_LAST", 10)
    store = open_store(_url(tmp_path / "shoal.db"), clock=SystemClock())
    sizes = []
    for number in range(60):
        await store.write(partial(submit, number=number))
        sizes.append((tmp_path / "shoal.db-wal").stat().st_size)
    await store.close()
    each = sizes[1] - sizes[0]
    assert max(sizes) < sizes[0] + 30 * each, "the log is used again from its start once it was checkpointed"


async def test_reader_sees_one_moment_while_writes_go_on(tmp_path: Path) -> None:
    store = open_store(_url(tmp_path / "shoal.db"), clock=SystemClock())
    database = store._database
    with database.connect_reader() as reader:
        database.begin_read(reader)
        count = "SELECT count(*) FROM jobs"
        before = reader.exec_driver_sql(count).scalar()
        await store.write(lambda tx: submit(tx, 1))
        assert reader.exec_driver_sql(count).scalar() == before
        reader.rollback()
        assert reader.exec_driver_sql(count).scalar() == 1
    await store.close()


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://u:hunter2@h/x", "shoal.db", ""])
def test_url_that_names_no_store_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(StateError, match="cannot keep state") as caught:
        open_store(url, clock=SystemClock())
    assert "hunter2" not in caught.value.message


def test_file_that_is_not_a_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "shoal.db"
    path.write_text("notes about the cluster, not a database\n" * 100)
    before = path.read_bytes()
    with pytest.raises(StoreUnavailable, match="not a database"):
        open_store(_url(path), clock=SystemClock())
    assert path.read_bytes() == before


def test_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match="cannot open the database"):
        open_store(_url(tmp_path / "file" / "shoal.db"), clock=SystemClock())


def test_database_of_a_newer_shoal_is_refused_and_not_locked(tmp_path: Path) -> None:
    url = _url(tmp_path / "shoal.db")
    anyio.run(open_store(url, clock=SystemClock()).close)
    with sqlite3.connect(tmp_path / "shoal.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    for _ in range(2):
        with pytest.raises(StateError, match=r"newer Shoal.*9999"):
            open_store(url, clock=SystemClock())
