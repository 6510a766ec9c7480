"""Two control planes on one real PostgreSQL: one leads, and what another leads since is not touched."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import psycopg
import pytest

from shoal.clock import SystemClock
from shoal.errors import Deposed, StateError, StoreUnavailable
from shoal.store import EventFilter, LeadershipWatch, open_store
from shoal.store.threaded import ThreadedStore
from tests.support.host.postgres import PostgresServer, postgres
from tests.support.store_records import submit

__all__ = ["postgres"]

FIRST, SECOND = "http://127.0.0.1:7001", "http://127.0.0.1:7002"


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[str]:
    name = postgres.new_database()
    yield name
    postgres.drop_database(name)


@pytest.fixture
def url(postgres: PostgresServer, database: str) -> str:
    return postgres.url(database)


@pytest.fixture
def standby(url: str) -> Iterator[LeadershipWatch]:
    made = LeadershipWatch(url)
    yield made
    made.close()


def lead(url: str, own: str) -> ThreadedStore:
    return open_store(url, clock=SystemClock(), leader=own)


def end_sessions(postgres: PostgresServer, database: str) -> None:
    with psycopg.connect(postgres.dsn(database), autocommit=True) as other:
        other.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


async def test_terms_grow_and_are_in_the_log(url: str) -> None:
    for term, own in enumerate((FIRST, SECOND, FIRST), start=1):
        store = lead(url, own)
        assert store.term == term
        await store.close()
    store = lead(url, SECOND)
    events = await store.read(lambda tx: tx.events.latest(10, EventFilter(kinds_prefix="control.")))
    assert [(event.data["term"], event.data["url"]) for event in events] == [
        (1, FIRST),
        (2, SECOND),
        (3, FIRST),
        (4, SECOND),
    ]
    assert await store.read(lambda tx: tx.events.verify()) is None
    await store.close()


async def test_deposed_leader_changes_nothing_and_answers_nothing(
    postgres: PostgresServer, database: str, url: str
) -> None:
    old = lead(url, FIRST)
    deposed = threading.Event()
    old.on_deposed(deposed.set)
    await old.write(lambda tx: submit(tx, 1))
    end_sessions(postgres, database)
    new = lead(url, SECOND)
    with pytest.raises(Deposed, match="since term 1"):
        await old.read(lambda tx: tx.jobs.count_open("vision"))
    assert deposed.is_set()
    with pytest.raises(Deposed):
        await old.write(lambda tx: submit(tx, 2))
    assert await new.read(lambda tx: tx.jobs.count_open("vision")) == 1
    await new.close()
    # The lock is free again, and still: what the first one knows is older than what the second did.
    with pytest.raises(Deposed):
        await old.write(lambda tx: submit(tx, 2))
    await old.close()


async def test_deposed_writer_finds_out_by_itself(postgres: PostgresServer, database: str, url: str) -> None:
    old = lead(url, FIRST)
    end_sessions(postgres, database)
    await lead(url, SECOND).close()
    with pytest.raises(Deposed):
        await old.write(lambda tx: submit(tx, 1))
    new = lead(url, SECOND)
    assert new.term == 3
    assert await new.read(lambda tx: tx.jobs.count_open("vision")) == 0
    await new.close()
    await old.close()


async def test_lock_that_was_lost_without_a_successor_is_taken_again_in_the_same_term(
    postgres: PostgresServer, database: str, url: str
) -> None:
    store = lead(url, FIRST)
    end_sessions(postgres, database)
    assert await store.write(lambda tx: submit(tx, 1)) == 1
    assert store.term == 1
    await store.close()


async def test_somebody_with_the_lock_whose_term_has_not_begun_interrupts_and_does_not_depose(
    postgres: PostgresServer, database: str, url: str
) -> None:
    store = lead(url, FIRST)
    end_sessions(postgres, database)
    with psycopg.connect(postgres.dsn(database), autocommit=True) as other:
        other.execute(f"SELECT pg_advisory_lock({0x53686F616C})")
        with pytest.raises(StoreUnavailable, match="another control plane") as raised:
            await store.write(lambda tx: submit(tx, 1))
        assert not isinstance(raised.value, Deposed)
    assert await store.write(lambda tx: submit(tx, 1)) == 1
    await store.close()


async def test_term_changed_behind_the_leader_stops_its_next_transaction(
    postgres: PostgresServer, database: str, url: str
) -> None:
    """The guard itself: the session and its lock are as they were."""
    store = lead(url, FIRST)
    with psycopg.connect(postgres.dsn(database)) as other:
        other.execute("UPDATE meta SET value = '2' WHERE key = 'control.term'")
    with pytest.raises(Deposed):
        await store.write(lambda tx: submit(tx, 1))
    await store.close()
    with psycopg.connect(postgres.dsn(database)) as other:
        assert other.execute("SELECT count(*) FROM jobs").fetchone() == (0,)


async def test_server_is_told_to_end_the_session_of_a_leader_that_says_nothing(
    postgres: PostgresServer, database: str, url: str
) -> None:
    store = lead(url, FIRST)
    with psycopg.connect(postgres.dsn(database)) as other:
        # What the server would do to an idle session, it is asked: 15 s are long for a test.
        told = await store.write(
            lambda tx: [
                tx.session.send(f"SHOW {name}").fetchone()
                for name in ("idle_session_timeout", "idle_in_transaction_session_timeout")
            ]
        )
        assert other.info.server_version >= 140_000
    assert told == [("15s",), ("15s",)]
    await store.close()


async def test_standby_hears_of_the_leader_and_of_its_end(url: str, standby: LeadershipWatch) -> None:
    assert (standby.leader(), standby.meta("home_id"), standby.announce(FIRST)) == (None, None, (FIRST,))
    store = lead(url, FIRST)
    told = standby.leader()
    assert told is not None
    assert (told.term, told.url) == (1, FIRST)
    assert not standby.wait(0.01)
    freed: list[bool] = []
    waiting = threading.Thread(target=lambda: freed.append(standby.wait(60.0)))
    waiting.start()
    await store.close()
    waiting.join(60.0)
    assert freed == [True]
    assert standby.leader() is None
    # And it holds nothing by that.
    other = lead(url, SECOND)
    assert other.term == 2
    await other.close()


async def test_control_planes_know_each_other_by_what_they_told_lately(
    postgres: PostgresServer, database: str, url: str, standby: LeadershipWatch
) -> None:
    store = lead(url, FIRST)
    other = LeadershipWatch(url)
    assert standby.announce(FIRST) == (FIRST,)
    assert other.announce(SECOND) == (FIRST, SECOND)
    with psycopg.connect(postgres.dsn(database)) as connection:
        connection.execute(
            "UPDATE meta SET value = (value::bigint - 7200)::text WHERE key = %s", [f"plane:{FIRST}"]
        )
    assert other.announce(SECOND) == (SECOND,)
    assert standby.announce(FIRST) == (FIRST, SECOND)
    other.close()
    await store.close()


async def test_standby_goes_on_after_the_server_was_restarted(
    postgres: PostgresServer, url: str, standby: LeadershipWatch
) -> None:
    assert standby.wait(0.01)
    postgres.stop()
    with pytest.raises(StoreUnavailable):
        standby.wait(0.01)
    postgres.start()
    assert standby.wait(1.0)


async def test_who_is_no_leader_has_no_term(url: str) -> None:
    store = open_store(url, clock=SystemClock())
    assert store.term == 0
    with pytest.raises(StateError, match="another control plane"):
        lead(url, SECOND)
    await store.close()
