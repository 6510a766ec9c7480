"""Whether a promised start is the latest there can be, as far as it depends on those who wait today.

A promise rests on the time limits of what runs. It leaves out whoever may come first by then: one that is
held back by a limit, a quota or its array today, is due only later, is of a project whose turn comes as
shares change, or may take other or more nodes than it was promised itself. And it leaves out whoever starts
beside it and uses up a limit that both are under, or is small enough for a quota that it is too large for.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

from shoal.scheduler.rows import Turn, place_by_age, place_by_score
from shoal.scheduler.snapshot import Candidate, Snapshot
from shoal.scheduler.tree import Tree
from shoal.scheduler.types import Promise


def firm_starts(snapshot: Snapshot, promises: Collection[Promise], now: float) -> dict[str, float]:
    """Promised starts that nobody of those who wait can put off, by attempt."""
    promised = {one.attempt_id: one.at for one in promises if one.at is not None}
    heads = [one for one in snapshot.candidates if one.attempt_id in promised]
    tree = Tree(snapshot.projects)

    @cache
    def ceilings(project: str) -> frozenset[str]:
        return frozenset(view.name for view in tree.line(project) if view.quota or view.limit or view.borrow)

    def is_firm(head: Candidate) -> bool:
        at, shared = promised[head.attempt_id], ceilings(head.project)
        return not any(
            _may_go_first(one, head, now, at) or not shared.isdisjoint(ceilings(one.project))
            for one in snapshot.candidates
            if one is not head
        )

    return {head.attempt_id: promised[head.attempt_id] for head in heads if is_firm(head)}


def _may_go_first(one: Candidate, head: Candidate, now: float, at: float) -> bool:
    """At any moment until then."""
    if one.priority != head.priority or one.project != head.project:
        return one.priority >= head.priority
    moments = (now, min(max(one.due_at or now, now), at), at)
    return any(_turn(one, moment) < _turn(head, moment) for moment in moments)


def _turn(candidate: Candidate, at: float) -> Turn:
    """Its place then among those of its project and priority."""
    is_due = candidate.due_at is None or candidate.due_at <= at
    return not is_due, place_by_age(candidate) if is_due else place_by_score(candidate)
