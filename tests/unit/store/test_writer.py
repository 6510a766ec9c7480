"""The writer's thread: shared commits, answers after commit, and failures that spoil only one batch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import anyio
import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from shoal.clock import SystemClock
from shoal.errors import StateError, StoreUnavailable
from shoal.store import Store, Tx, open_store
from shoal.store.sqlite import SqliteDatabase
from shoal.store.threaded import ThreadedStore
from tests.support.store_records import a_job, add_job, end_job, submit


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[ThreadedStore]:
    store = open_store(f"sqlite:///{tmp_path}/shoal.db", clock=SystemClock())
    yield store
    await store.close()


class Gate:
    """Holds the writer inside a change, so that others pile up behind it."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def hold(self, tx: Tx) -> None:
        self.entered.set()
        assert self.opened.wait(30)


async def _until(is_true: threading.Event) -> None:
    assert await anyio.to_thread.run_sync(is_true.wait, 30)


async def _pile_up(store: Store, count: int) -> list[asyncio.Task[object]]:
    """Tasks whose changes are all in the queue behind a gate that the caller opens."""
    tasks = [asyncio.create_task(_write(store, n)) for n in range(count)]
    await asyncio.sleep(0)
    return tasks


async def _write(store: Store, number: int) -> object:
    return await store.write(lambda tx: submit(tx, number))


async def test_changes_that_wait_together_share_one_commit(store: ThreadedStore) -> None:
    commits: list[int] = []
    store.on_commit(commits.append)
    gate = Gate()
    first = asyncio.create_task(store.write(gate.hold))
    await _until(gate.entered)
    tasks = await _pile_up(store, 50)
    gate.opened.set()
    await first
    numbers = await asyncio.gather(*tasks)
    assert sorted(numbers) == list(range(1, 51))  # type: ignore[type-var]
    # How many changes fit in the first batch depends on milliseconds. That they share a commit does not.
    assert len(commits) < 25


async def test_no_caller_is_answered_before_the_commit(
    store: ThreadedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, real = Gate(), Connection.commit

    def commit(connection: Connection) -> None:
        gate.hold(None)  # type: ignore[arg-type]
        real(connection)

    monkeypatch.setattr(Connection, "commit", commit)
    task = asyncio.create_task(_write(store, 1))
    await _until(gate.entered)
    assert not task.done()
    assert await store.read(lambda tx: tx.events.head().seq) == 0
    gate.opened.set()
    assert await task == 1


async def test_failed_commit_fails_every_caller_in_the_batch_and_the_next_commit_works(
    store: ThreadedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([True])

    def commit(connection: Connection, real: object = Connection.commit) -> None:
        if next(failures, False):
            raise OperationalError("COMMIT", {}, Exception("database or disk is full"))
        real(connection)  # type: ignore[operator]

    gate = Gate()
    first = asyncio.create_task(store.write(gate.hold))
    await _until(gate.entered)
    tasks = await _pile_up(store, 1)
    monkeypatch.setattr(Connection, "commit", commit)
    gate.opened.set()
    answers = await asyncio.gather(first, *tasks, return_exceptions=True)
    assert isinstance(answers[0], StoreUnavailable)
    assert "disk is full" in answers[0].message
    succeeded = [answer for answer in answers if not isinstance(answer, BaseException)]
    head = await store.read(lambda tx: tx.events.head().seq)
    assert head == 2 * len(succeeded)
    await store.write(lambda tx: submit(tx, 7))
    assert await store.read(lambda tx: tx.events.head().seq) == head + 2
    assert await store.read(lambda tx: tx.events.verify()) is None


async def test_error_that_leaves_the_connection_unknown_undoes_the_whole_batch(store: ThreadedStore) -> None:
    def lose(tx: Tx) -> None:
        submit(tx, 1)
        raise OperationalError("INSERT", {}, Exception("disk I/O error"))

    seen: list[str] = []
    store.watch_writes(lambda error: seen.append(error.message if error else "well"))
    with pytest.raises(StoreUnavailable, match="disk I/O error"):
        await store.write(lose)
    assert await store.write(lambda tx: submit(tx, 1)) == 1
    await store.write(lambda tx: submit(tx, 2))
    assert ("disk I/O error" in seen[0], {*seen[1:]}) == (True, {"well"}), (
        "the watcher is called after each write"
    )


async def test_change_of_a_cancelled_caller_does_not_affect_other_changes(store: ThreadedStore) -> None:
    gate = Gate()
    first = asyncio.create_task(store.write(gate.hold))
    await _until(gate.entered)
    [cancelled, other] = await _pile_up(store, 2)
    cancelled.cancel()
    await asyncio.sleep(0)
    gate.opened.set()
    await first
    assert await other in (1, 2)
    with pytest.raises(asyncio.CancelledError):
        await cancelled


async def test_close_finishes_pending_writes(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/other.db", clock=SystemClock())
    gate = Gate()
    first = asyncio.create_task(store.write(gate.hold))
    await _until(gate.entered)
    tasks = await _pile_up(store, 5)
    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0.01)
    gate.opened.set()
    await asyncio.gather(first, closing)
    assert await asyncio.gather(*tasks) == [1, 2, 3, 4, 5]


async def test_commit_callback_that_raises_does_not_stop_the_writer(
    store: ThreadedStore, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(seq: int) -> None:
        raise ValueError(seq)

    store.on_commit(fail)
    assert await store.write(lambda tx: submit(tx, 1)) == 1
    assert await store.write(lambda tx: submit(tx, 2)) == 2
    assert "a commit callback failed" in caplog.text


async def test_housekeeping_that_fails_does_not_stop_the_writer(
    store: ThreadedStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(SqliteDatabase, "tidy", fail)
    monkeypatch.setattr("shoal.store.threads.TIDY_EVERY", 1)
    monkeypatch.setattr("shoal.store.threads.TIDY_AT_LAST", 1)
    for number in (1, 2, 3):
        assert await store.write(partial(submit, number=number)) == number
    assert "housekeeping" in caplog.text


def test_store_serves_one_event_loop_after_another(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/loops.db", clock=SystemClock())
    assert asyncio.run(_write(store, 1)) == 1
    assert anyio.run(_write, store, 2) == 2
    asyncio.run(store.close())


async def test_undone_change_leaves_nothing_to_the_next_change_of_its_batch(store: ThreadedStore) -> None:
    job = a_job()
    attempt = await store.write(lambda tx: add_job(tx, job))

    def undone(tx: Tx) -> None:
        end_job(tx, job, attempt)
        raise StateError("not now")

    def seen(tx: Tx) -> object:
        return tx.jobs.get(job.job_id), tx.attempts.get(attempt.attempt_id)

    gate = Gate()
    first = asyncio.create_task(store.write(gate.hold))
    await _until(gate.entered)
    tasks = [asyncio.create_task(store.write(change)) for change in (undone, seen)]
    await asyncio.sleep(0)
    gate.opened.set()
    await first
    with pytest.raises(StateError):
        await tasks[0]
    assert await tasks[1] == (job, attempt)
