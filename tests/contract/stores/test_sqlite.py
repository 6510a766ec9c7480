"""SQLite on disk, held to the store's contract."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shoal.clock import SystemClock
from shoal.store import Store, open_store
from tests.contract.stores.event_log_contract import EventLogContract, Tamper
from tests.contract.stores.metrics_contract import MetricsContract
from tests.contract.stores.store_contract import StoreContract

TRIGGERS = ("events_keep", "events_keep_all", "events_at_end")


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = open_store(f"sqlite:///{tmp_path}/shoal.db", clock=SystemClock())
    yield store
    await store.close()


@pytest.fixture
def tamper(tmp_path: Path) -> Tamper:
    def run(sql: str) -> None:
        with sqlite3.connect(tmp_path / "shoal.db") as connection:
            for trigger in TRIGGERS:
                connection.execute(f"DROP TRIGGER IF EXISTS {trigger}")
            connection.execute(sql)
        connection.close()

    return run


class TestSqliteStore(StoreContract):
    __test__ = True


class TestSqliteEventLog(EventLogContract):
    __test__ = True


class TestSqliteMetrics(MetricsContract):
    __test__ = True
