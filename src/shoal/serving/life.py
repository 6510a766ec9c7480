"""Which replicas to start, drain and stop, for as many of each release as there should be. Pure.

A replica goes in three steps: it is given nothing new, it finishes what it has, it is stopped. One that is of
no use (it failed, or nobody can reach it) is stopped at once and another started in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A replica as far as it matters here."""

    replica_id: str
    release: int
    slot: int
    is_ready: bool = False
    draining_s: float | None = None
    """For how long it has been given nothing new; None: it is."""
    is_leaving: bool = False
    """Its node is being emptied: it serves until another is ready in its place."""
    is_idle: bool = False
    """Every data plane knows that it drains, and has nothing in it."""
    failing: str = ""
    """Why it is of no use."""
    waits: str = ""
    """Why it is not even started yet, if that takes long."""


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    start: tuple[int, ...] = ()
    """For each replica to start, its release."""
    drain: tuple[str, ...] = ()
    stop: tuple[tuple[str, str], ...] = ()
    """Which, and why."""

    @property
    def is_nothing(self) -> bool:
        return not (self.start or self.drain or self.stop)


def decide(wanted: Mapping[int, int], replicas: Sequence[Seen], *, drain_s: float, may_start: bool) -> Steps:
    """`wanted`: how many of each release; of one that is not named, none. `replicas`: whose stop nobody has
    asked for yet. The same replicas and wishes give the same steps, and once these are taken, none.
    """
    stop = [(one.replica_id, one.failing) for one in replicas if one.failing]
    stop += [
        (one.replica_id, "drained" if one.is_idle else f"drained for {drain_s:g} s")
        for one in replicas
        if not one.failing and one.draining_s is not None and (one.is_idle or one.draining_s >= drain_s)
    ]
    start: list[int] = []
    drain: list[str] = []
    serving = [one for one in replicas if not one.failing and one.draining_s is None]
    for release in sorted({*wanted, *(one.release for one in serving)}):
        own = [one for one in serving if one.release == release]
        staying = [one for one in own if not one.is_leaving]
        count = wanted.get(release, 0)
        start += [release] * (count - len(staying) if may_start else 0)
        for one in (*surplus(staying, count), *_replaced(own, count)):
            if one.is_ready:
                drain.append(one.replica_id)
            else:
                stop.append((one.replica_id, "not needed any more"))
    return Steps(start=tuple(start), drain=tuple(drain), stop=tuple(stop))


def _replaced(own: Sequence[Seen], count: int) -> list[Seen]:
    """Those that leave and can: who serves nothing yet, and as many as are ready beyond `count`."""
    leaving = sorted((one for one in own if one.is_leaving), key=lambda one: (one.is_ready, one.slot))
    idle = sum(not one.is_ready for one in leaving)
    return leaving[: idle + max(0, sum(one.is_ready for one in own) - count)]


def surplus(replicas: Sequence[Seen], count: int) -> list[Seen]:
    """Those beyond `count`: first who serves nothing yet, then the youngest."""
    in_order = sorted(replicas, key=lambda one: (not one.is_ready, one.slot))
    return in_order[max(0, count) :]
