"""A copy of a live database: one moment, one file, and no files left of a failed copy."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from sqlalchemy import create_engine

from shoal.clock import SystemClock
from shoal.errors import StoreUnavailable
from shoal.store import Tx, open_store
from shoal.store.copying import copy_stopped_sqlite
from shoal.store.sqlite import SqliteDatabase


def add(tx: Tx) -> None:
    for _ in range(20):
        tx.events.append("a.b", at=1.0, actor="ana", data={"words": "x" * 10_000})


async def test_a_copy_is_of_one_moment_while_writers_continue(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/a.db", clock=SystemClock())
    for _ in range(20):
        await store.write(add)
    during = 0
    is_over = anyio.Event()

    async def write() -> None:
        nonlocal during
        while not is_over.is_set():
            await store.write(add)
            during += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write)
        head = await anyio.to_thread.run_sync(store.copy_to, tmp_path / "copy.db")
        is_over.set()
    assert during
    await store.close()
    assert sorted(one.name for one in tmp_path.glob("copy*")) == ["copy.db"]  # noqa: ASYNC240
    with contextlib.closing(sqlite3.connect(tmp_path / "copy.db")) as copy:
        assert copy.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert copy.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        assert copy.execute("SELECT max(seq), count(*) FROM events").fetchone() == (head.seq, head.seq)
    again = open_store(f"sqlite:///{tmp_path}/copy.db", clock=SystemClock())
    assert await again.read(lambda tx: tx.events.verify(anchor=head)) is None
    await again.close()


async def test_nothing_is_left_of_a_copy_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"sqlite:///{tmp_path}/a.db", clock=SystemClock())
    await store.write(add)
    await store.close()
    first = copy_stopped_sqlite(tmp_path / "a.db", tmp_path / "whole.db", lambda _done, _of: None)
    assert first.seq == 20

    def fail(_descriptor: int) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("shoal.store.copying.os.fdatasync", fail)
    with pytest.raises(StoreUnavailable, match="disk is full"):
        copy_stopped_sqlite(tmp_path / "a.db", tmp_path / "half.db", lambda _done, _of: None)
    assert not (tmp_path / "half.db").exists()


async def test_database_that_cannot_be_read_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a descriptor, or on a failing disk: any other error would end the process that
    serves backups.
    """
    store = open_store(f"sqlite:///{tmp_path}/a.db", clock=SystemClock())
    missing = create_engine(f"sqlite:///{tmp_path}/missing/b.db")
    monkeypatch.setattr(SqliteDatabase, "connect_reader", lambda _: missing.connect())
    with pytest.raises(StoreUnavailable, match="unable to open"):
        await anyio.to_thread.run_sync(store.copy_to, tmp_path / "copy.db")
    assert not (tmp_path / "copy.db").exists()
    await store.close()
