"""Drills that are under way, and what supervisors have said that they are judged by.

In memory: the log of events has what was asked, and a supervisor says what it did again with every renewal.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shoal.model.attempt import Attempt
from shoal.model.drill import Drill, order_for
from shoal.wire import DrillAct, Drilled, DrillOrder, Progress, Renewal, Signs

Share = tuple[str, str]
"""An attempt's id and a node."""


class Open:
    """One drill that has not come to its end."""

    def __init__(self, drill: Drill, *, is_from_before: bool = False) -> None:
        self.drill = drill
        self.is_from_before = is_from_before
        """Asked of a control plane that this one follows."""
        self.acts: dict[str, list[Drilled]] = {}
        """By node."""
        self.noticed_at: float | None = None
        self.seen_at: float | None = None
        """When the newest step was made that anybody told of; of several jobs, where that is longest ago."""
        self.asked_at: float | None = None
        """When supervisors were asked, for the last time, how far they are."""

    @property
    def done(self) -> tuple[Drilled, ...]:
        """In order."""
        told = (one for acts in self.acts.values() for one in acts)
        return tuple(sorted(told, key=lambda one: one.at))

    def order_for(self, node: str) -> DrillOrder | None:
        order = order_for(self.drill, node, self.done)
        if order is None or any(one.act is order.act for one in self.acts.get(node, ())):
            return None
        return order

    def heard(self, node: str, drilled: Drilled) -> bool:
        """Whether that was new."""
        acts = self.acts.setdefault(node, [])
        is_new = all(one.act is not drilled.act for one in acts)
        if is_new:
            acts.append(drilled)
        return is_new


class DrillBook:
    """Used on the event loop alone."""

    def __init__(self) -> None:
        self.open: dict[str, Open] = {}
        self.opened_at: float | None = None
        """When it was read from the log; None: it has to be."""
        self.newest: dict[str, str] = {}
        """By drill, the newest attempt of its job."""
        self._progress: dict[Share, Progress] = {}
        self._groups: dict[Share, int] = {}
        self._signs: dict[Share, Signs] = {}
        self._heard_at: dict[Share, float] = {}

    def of_job(self, job_id: str) -> Open | None:
        return next((one for one in self.open.values() if one.drill.job_id == job_id), None)

    def heard(self, renewal: Renewal, now: float) -> bool:
        """Note what a supervisor says. Whether others may have something to do now."""
        share = (renewal.attempt_id, renewal.node)
        self._heard_at.setdefault(share, now)
        self._groups[share] = renewal.generation
        if renewal.progress is not None:
            self._progress[share] = renewal.progress
        if renewal.signs is not None:
            self._signs[share] = renewal.signs
        drilled = renewal.drilled
        mine = self.open.get(drilled.drill_id) if drilled is not None else None
        return mine is not None and drilled is not None and mine.heard(renewal.node, drilled)

    def order_for(self, attempt: Attempt, node: str) -> DrillOrder | None:
        """What a supervisor has to do now. What follows those that a drill was asked for is not harmed."""
        for one in self.open.values():
            order = one.order_for(node) if one.drill.attempt_id == attempt.attempt_id else None
            if order is not None and self._is_meant(one.drill, order, attempt, node):
                return order
        return None

    def _is_meant(self, drill: Drill, order: DrillOrder, attempt: Attempt, node: str) -> bool:
        """Whether the group is still the one that the drill was asked for."""
        if order.act is not DrillAct.KILL_RANKS:
            return attempt.generation == drill.generation
        # Where they were killed first the next group is asked for before the others hear of it.
        is_same_share = attempt.incarnation(node) <= drill.generation
        return is_same_share and self.group(attempt.attempt_id, node) == drill.generation

    def close(self, drill_id: str) -> None:
        self.open.pop(drill_id, None)
        self.newest.pop(drill_id, None)

    def progress(self, attempt_id: str, nodes: Iterable[str]) -> tuple[Progress, ...]:
        """The newest of each of these nodes that has said it."""
        found = (self._progress.get((attempt_id, node)) for node in nodes)
        return tuple(one for one in found if one is not None)

    def signs(self, attempt: Attempt) -> tuple[Signs, ...]:
        """What the newest group of the attempt shows of itself; empty until every node has said it."""
        told = [self._signs.get((attempt.attempt_id, node)) for node in attempt.node_names]
        found = tuple(one for one in told if one is not None and one.generation == attempt.generation)
        return found if len(found) == len(told) else ()

    def group(self, attempt_id: str, node: str) -> int:
        """Which group of ranks it said it runs; -1: it has said nothing yet."""
        return self._groups.get((attempt_id, node), -1)

    def heard_at(self, attempt_id: str, node: str) -> float | None:
        """When this control plane first heard from it."""
        return self._heard_at.get((attempt_id, node))

    def keep_only(self, attempt_ids: Iterable[str]) -> None:
        """Forget attempts that hold nothing any more, but for those of drills under way."""
        kept = {*attempt_ids, *(one.drill.attempt_id for one in self.open.values())}
        self._progress = {share: one for share, one in self._progress.items() if share[0] in kept}
        self._groups = {share: one for share, one in self._groups.items() if share[0] in kept}
        self._signs = {share: one for share, one in self._signs.items() if share[0] in kept}
        self._heard_at = {share: one for share, one in self._heard_at.items() if share[0] in kept}


def rounded(number: float | None) -> float | None:
    """Milliseconds: more was never measured."""
    return None if number is None else round(number, 3)


def facts_of(drill: Drill) -> dict[str, object]:
    """As the log keeps it."""
    told: dict[str, object] = msgspec.to_builtins(drill)
    return told
