"""The record of jobs, attempts, nodes, people and the event log, in SQLite or PostgreSQL.

A caller passes a function of a transaction to `Store.write` or `Store.read`. On the way down:

base          the promises of every store, and the plain values that go in and out
threaded      the store of a running control plane: asyncio, one writer, several readers
threads       the queue of the writer's thread; many changes share one commit
transaction   `Tx`: one table object for each noun (tables/)
session       statements compiled once for each kind of database
database      what `sqlite` and `postgres` have in common; `leadership` is for PostgreSQL
schema        the tables as the newest migration leaves them
hash_chain    the chain and the anchor of the event log; `copying` is for backups, `memory` for tests

Other folders decide what to record. The store talks to no engine, and to no server but the database's.
"""

from shoal.store.base import (
    ChainFlaw,
    Event,
    EventFilter,
    EventScan,
    JobFilter,
    KeyReused,
    LogHead,
    OnCommit,
    StaleRecord,
    Store,
)
from shoal.store.hash_chain import read_anchor, write_anchor
from shoal.store.leadership import LeaderRecord, LeadershipWatch
from shoal.store.memory import open_memory_store
from shoal.store.tables.metrics import MetricSeries
from shoal.store.tables.people import logged_token
from shoal.store.tables.submissions import ArrayVerb
from shoal.store.threaded import open_store
from shoal.store.transaction import Tx

__all__ = [
    "ArrayVerb",
    "ChainFlaw",
    "Event",
    "EventFilter",
    "EventScan",
    "JobFilter",
    "KeyReused",
    "LeaderRecord",
    "LeadershipWatch",
    "LogHead",
    "MetricSeries",
    "OnCommit",
    "StaleRecord",
    "Store",
    "Tx",
    "logged_token",
    "open_memory_store",
    "open_store",
    "read_anchor",
    "write_anchor",
]
