"""What is remembered: jobs, attempts, nodes, people and the event log, in SQLite or PostgreSQL.

Callers pass functions of a transaction to `write` and `read`. What is decided is decided above;
nothing here talks to an engine or a network other than the database's.
"""

from shoal.store.anchor import read_anchor, write_anchor
from shoal.store.array_work import ArrayVerb
from shoal.store.base import (
    Event,
    EventFilter,
    Flaw,
    Head,
    JobFilter,
    KeyReused,
    Look,
    OnCommit,
    Stale,
    Store,
)
from shoal.store.lead import Lead, Standby
from shoal.store.memory import open_memory_store
from shoal.store.metrics import Series
from shoal.store.opening import open_store
from shoal.store.people_changes import logged_token
from shoal.store.transaction import Tx

__all__ = [
    "ArrayVerb",
    "Event",
    "EventFilter",
    "Flaw",
    "Head",
    "JobFilter",
    "KeyReused",
    "Lead",
    "Look",
    "OnCommit",
    "Series",
    "Stale",
    "Standby",
    "Store",
    "Tx",
    "logged_token",
    "open_memory_store",
    "open_store",
    "read_anchor",
    "write_anchor",
]
