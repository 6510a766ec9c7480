"""What every store promises, and the plain values its repositories take and return.

Nothing here knows a database. Callers hand in synchronous functions of a transaction; they never
hold a connection, and never see one fail half way.
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
"""Takes the newest event's `seq`. Runs on the writer's thread, so it must not block."""


class Stale(StateError):
    """Somebody changed the record since it was read: read it again and decide again."""

    code = "state.stale"


class KeyReused(StateError):
    """An idempotency key came back with another request than the one it was first used for."""

    code = "idempotency.mismatch"


class Store(Protocol):
    """What is remembered. SQLite, PostgreSQL and the in-memory store all pass one contract suite."""

    async def write(self, fn: Callable[[Tx], T], *, patience_s: float = 0.0) -> T:
        """Run `fn` in a transaction and return its value once that is durable.

        `fn` runs on another thread, must be deterministic and must not block. What it raises undoes
        its own changes and nobody else's, and reaches the caller. `StoreUnavailable`: nothing was
        acknowledged; the change may still have happened if the database went away during its
        commit, so repeat it under the same idempotency key. A cancelled caller's change may happen.
        `patience_s`: for how long it lets changes pass that come after it, while the store is busy.
        """
        ...

    async def read(self, fn: Callable[[Tx], T]) -> T:
        """Run `fn` against one consistent view that includes every acknowledged write.

        `fn` may be run again if a connection was lost, and cannot change anything.
        """
        ...

    def on_commit(self, callback: OnCommit) -> None:
        """Have `callback` called after each commit, before its writers are answered."""
        ...

    async def close(self) -> None:
        """Finish the writes already asked for, then let go of the database. May be repeated."""
        ...


class JobFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which jobs to list. None: whatever it is; an empty tuple matches nothing."""

    projects: tuple[str, ...] | None = None
    statuses: tuple[str, ...] | None = None
    """Of `queued starting running stopping succeeded failed cancelled`."""
    name: str | None = None
    owner: str | None = None
    """A user's id."""
    array_id: str | None = None


class EventFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which events to list. None: whatever it is; an empty tuple matches nothing."""

    projects: tuple[str, ...] | None = None
    job_id: str | None = None
    service: str | None = None
    """The name of one: what is about it, its rollouts, its tokens, and the jobs that are its replicas."""
    node: str | None = None
    kinds_prefix: str | None = None
    without_ours: bool = False
    """Not what Shoal did by itself: only what people, jobs, supervisors and the unknown did or tried."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the log: what happened, who did it, and the hash that chains it to all before."""

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


class Look(NamedTuple):
    """What one bounded look at the log found, and how far it came."""

    entries: list[Event]
    reached: int
    """The next look goes on from this entry."""
    is_done: bool
    """Nothing is left beyond it."""


class Head(NamedTuple):
    """The newest entry of the log, or any entry one wants to remember."""

    seq: int
    hash: str


class Flaw(NamedTuple):
    """The first entry of the log that cannot be what was written, and why."""

    seq: int
    reason: str
