"""The in-memory store of the simulation, held to the store's contract."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from shoal.store import Store, open_memory_store
from shoal.store.memory import MemoryStore
from tests.contract.stores.event_log_contract import EventLogContract, Tamper
from tests.contract.stores.metrics_contract import MetricsContract
from tests.contract.stores.store_contract import StoreContract
from tests.contract.stores.test_sqlite import TRIGGERS


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    store = open_memory_store()
    yield store
    await store.close()


@pytest.fixture
def tamper(store: MemoryStore) -> Tamper:
    def run(sql: str) -> None:
        connection = store._database.connect_writer()
        for trigger in TRIGGERS:
            connection.exec_driver_sql(f"DROP TRIGGER IF EXISTS {trigger}")
        connection.exec_driver_sql(sql)
        connection.commit()

    return run


class TestMemoryStore(StoreContract):
    __test__ = True


class TestMemoryEventLog(EventLogContract):
    __test__ = True


class TestMemoryMetrics(MetricsContract):
    __test__ = True
