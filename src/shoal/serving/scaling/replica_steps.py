"""Decide which replicas to start, drain and stop, given how many of each release there should be. Pure.

A replica ends in three steps: it gets no new requests, it finishes its requests, it is stopped. A replica
that failed or cannot be reached is stopped at once, and another starts in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec


class ObservedReplica(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a replica that matter here."""

    replica_id: str
    release: int
    slot: int
    is_ready: bool = False
    draining_s: float | None = None
    """Seconds since it last got new requests; None: it gets them."""
    is_leaving: bool = False
    """Its node is being drained. It serves until another is ready in its place."""
    is_idle: bool = False
    """Every data plane knows that it drains, and it has no requests."""
    failing: str = ""
    """Why it is of no use."""
    waits: str = ""
    """Why it has not started, if that takes long."""


class ReplicaSteps(msgspec.Struct, frozen=True, kw_only=True):
    start: tuple[int, ...] = ()
    """The release of each replica to start."""
    drain: tuple[str, ...] = ()
    stop: tuple[tuple[str, str], ...] = ()
    """Replica ids, each with the reason."""

    @property
    def is_nothing(self) -> bool:
        return not (self.start or self.drain or self.stop)


def decide(
    wanted: Mapping[int, int], replicas: Sequence[ObservedReplica], *, drain_s: float, may_start: bool
) -> ReplicaSteps:
    """Return the steps. `wanted` says how many of each release there should be; a missing release means
    none. `replicas` excludes those already asked to stop. The same input gives the same steps, and once
    these are taken, none.
    """
    stop = [(replica.replica_id, replica.failing) for replica in replicas if replica.failing]
    stop += [
        (replica.replica_id, "drained" if replica.is_idle else f"drained for {drain_s:g} s")
        for replica in replicas
        if not replica.failing
        and replica.draining_s is not None
        and (replica.is_idle or replica.draining_s >= drain_s)
    ]
    start: list[int] = []
    drain: list[str] = []
    serving = [replica for replica in replicas if not replica.failing and replica.draining_s is None]
    for release in sorted({*wanted, *(replica.release for replica in serving)}):
        of_release = [replica for replica in serving if replica.release == release]
        staying = [replica for replica in of_release if not replica.is_leaving]
        count = wanted.get(release, 0)
        start += [release] * (count - len(staying) if may_start else 0)
        for replica in (*surplus(staying, count), *_replaced(of_release, count)):
            if replica.is_ready:
                drain.append(replica.replica_id)
            else:
                stop.append((replica.replica_id, "not needed any more"))
    return ReplicaSteps(start=tuple(start), drain=tuple(drain), stop=tuple(stop))


def _replaced(replicas: Sequence[ObservedReplica], count: int) -> list[ObservedReplica]:
    """Return the leaving replicas that may go: those not ready, and as many as are ready beyond `count`."""
    leaving = sorted(
        (replica for replica in replicas if replica.is_leaving),
        key=lambda replica: (replica.is_ready, replica.slot),
    )
    idle = sum(not replica.is_ready for replica in leaving)
    return leaving[: idle + max(0, sum(replica.is_ready for replica in replicas) - count)]


def surplus(replicas: Sequence[ObservedReplica], count: int) -> list[ObservedReplica]:
    """Return the replicas beyond `count`: first those not ready, then the youngest."""
    in_order = sorted(replicas, key=lambda replica: (not replica.is_ready, replica.slot))
    return in_order[max(0, count) :]
