"""How often the nodes of a recorded past failed, and how long they were away."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shoal.sim.assumptions import NodeFailureModel
from shoal.sim.history.facts import (
    AttemptEndFact,
    Fact,
    NodeFact,
    NodeRemovalFact,
    PlacementFact,
    QueuedFact,
    RecordedDecision,
    WindowsFact,
)
from shoal.sim.workload import NodeChange, Workload


class RecordedFailures(msgspec.Struct, frozen=True, kw_only=True):
    """A failure is a node that stops answering or is declared dead. Draining a node on purpose is none."""

    num_failures: int
    service_s: float
    """Seconds in service of all nodes together, without the time they were away."""
    away_s: float
    """Seconds away of all failures together. An open failure counts up to the end of the log."""

    def rate(self, repair_s: float | None = None) -> NodeFailureModel | None:
        """A model with the same failure rate, and the same time away unless `repair_s` is given. None: there
        were no failures.
        """
        if not self.num_failures or not self.service_s:
            return None
        mean_s = self.away_s / self.num_failures
        return NodeFailureModel(
            mtbf_s=self.service_s / self.num_failures, repair_s=mean_s if repair_s is None else repair_s
        )


def losses_in(facts: Iterable[tuple[int, Fact]]) -> RecordedFailures:
    """The whole log, read once."""
    count = _Count()
    for _, fact in facts:
        count.read(fact)
    return count.losses()


class _Count:
    def __init__(self) -> None:
        self._now = 0.0
        self._since: dict[str, tuple[float, bool]] = {}
        """By node: since when it has its present state, and whether that is lost."""
        self._failures = 0
        self._service_s = self._away_s = 0.0

    def read(self, fact: Fact) -> None:
        self._now = max(self._now, _moment(fact))
        if isinstance(fact, NodeFact):
            was_lost = self._settle(fact.view.name)
            self._failures += was_lost is False and fact.is_lost
            self._since[fact.view.name] = self._now, fact.is_lost
        elif isinstance(fact, NodeRemovalFact):
            self._settle(fact.name)
            self._since.pop(fact.name, None)

    def _settle(self, name: str) -> bool | None:
        """Count its time up to now. Return whether it was lost in it; None for a new node."""
        since, is_lost = self._since.get(name, (None, False))
        if since is None:
            return None
        if is_lost:
            self._away_s += self._now - since
        else:
            self._service_s += self._now - since
        return is_lost

    def losses(self) -> RecordedFailures:
        for name in self._since:
            self._settle(name)
        return RecordedFailures(num_failures=self._failures, service_s=self._service_s, away_s=self._away_s)


def _moment(fact: Fact) -> float:
    match fact:
        case QueuedFact():
            return fact.candidate.submitted_at
        case (
            PlacementFact()
            | AttemptEndFact()
            | NodeFact()
            | NodeRemovalFact()
            | WindowsFact()
            | RecordedDecision()
        ):
            return fact.at
        case _:
            return 0.0


def without_losses(workload: Workload) -> Workload:
    """Remove the recorded failures, so that others can be drawn in their place."""
    views = {node.name: node for node in workload.nodes}
    kept: list[NodeChange] = []
    for change in workload.changes:
        if change.is_loss or (change.name in views and views[change.name] == change.view):
            continue
        if change.view is None:
            views.pop(change.name, None)
        else:
            views[change.name] = change.view
        kept.append(change)
    return msgspec.structs.replace(workload, changes=tuple(kept))
