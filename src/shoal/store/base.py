"""The promises of every store, and the plain values that its tables take and return.

This module knows no database. Callers pass synchronous functions of a transaction. They never hold a
connection, and never see one fail half way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import msgspec

from shoal.errors import StateError

if TYPE_CHECKING:
    from shoal.store.transaction import Tx

T = TypeVar("T")

OnCommit = Callable[[int], None]
"""Takes the newest event's `seq`. The writer's thread calls it, so it must not block."""


class StaleRecord(StateError):
    """The record changed since it was read: read it again and decide again."""

    code = "state.stale"


class KeyReused(StateError):
    """The idempotency key was first used for another request."""

    code = "idempotency.mismatch"


class Store(Protocol):
    """The control plane's record. SQLite, PostgreSQL and the in-memory store all pass one contract suite."""

    async def write(self, fn: Callable[[Tx], T], *, patience_s: float = 0.0) -> T:
        """Run `fn` in a transaction and return its value once the change is durable.

        Another thread calls `fn`. It must be deterministic and must not block. If `fn` raises, only its own
        changes are undone, and the error reaches the caller. `StoreUnavailable`: nothing was acknowledged.
        The change may still have happened if the database went away during its commit, so repeat it under the
        same idempotency key. A cancelled caller's change may happen. `patience_s`: how long the change lets
        later changes pass while the store is busy.
        """
        ...

    async def read(self, fn: Callable[[Tx], T]) -> T:
        """Run `fn` against one consistent view that includes every acknowledged write.

        `fn` cannot change anything. It may run again if a connection was lost.
        """
        ...

    def on_commit(self, callback: OnCommit) -> None:
        """Have `callback` called after each commit, before its writers are answered."""
        ...

    async def close(self) -> None:
        """Finish the pending writes, then close the database. May be repeated."""
        ...


class JobFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which jobs to list. None matches every value; an empty tuple matches nothing."""

    projects: tuple[str, ...] | None = None
    statuses: tuple[str, ...] | None = None
    """Of `queued starting running stopping succeeded failed cancelled`."""
    name: str | None = None
    owner: str | None = None
    """The owner's user id."""
    array_id: str | None = None


class EventFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which events to list. None matches every value; an empty tuple matches nothing."""

    projects: tuple[str, ...] | None = None
    job_id: str | None = None
    service: str | None = None
    """The name of a service: matches its rollouts, its tokens, and the jobs that are its replicas."""
    node: str | None = None
    kinds_prefix: str | None = None
    without_ours: bool = False
    """Leave out what Shoal did by itself. Keep what people, jobs, supervisors and unknown callers did or
    tried.
    """


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the log: what happened, its actor, and the hash that chains it to all earlier entries."""

    seq: int
    hash: str
    at: float
    kind: str
    actor: str
    project: str | None = None
    job_id: str | None = None
    attempt_id: str | None = None
    node: str | None = None
    data: dict[str, Any] = {}
    request_id: str | None = None


class EventScan(NamedTuple):
    """The matching entries of one bounded scan, and how far the scan came."""

    entries: list[Event]
    reached: int
    """The next scan continues from this entry."""
    is_done: bool
    """No entries are left beyond it."""


class LogHead(NamedTuple):
    """The newest entry of the log, or another entry to remember."""

    seq: int
    hash: str


class ChainFlaw(NamedTuple):
    """The first entry of the log that cannot be what was written, and why."""

    seq: int
    reason: str
