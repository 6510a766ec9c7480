"""How often the nodes of a recorded past failed, and how long they were away."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shoal.sim.failures import Failures
from shoal.sim.history.facts import Decision, Fact, NodeGone, NodeIs, Over, Placed, Queued, WindowsAre
from shoal.sim.workload import NodeChange, Workload


class Losses(msgspec.Struct, frozen=True, kw_only=True):
    """A failure is a node that stops answering, or is declared dead; draining one on purpose is none."""

    num_failures: int
    service_s: float
    """Of all nodes together, without the time they were away."""
    away_s: float
    """Of all failures together; one that is not over counts up to where the log ends."""

    def rate(self, repair_s: float | None = None) -> Failures | None:
        """As often as these, and away as long as these were unless that is said; None: there were none."""
        if not self.num_failures or not self.service_s:
            return None
        mean_s = self.away_s / self.num_failures
        return Failures(
            mtbf_s=self.service_s / self.num_failures, repair_s=mean_s if repair_s is None else repair_s
        )


def losses_in(facts: Iterable[tuple[int, Fact]]) -> Losses:
    """The whole log, read once."""
    count = _Count()
    for _, fact in facts:
        count.read(fact)
    return count.losses()


class _Count:
    def __init__(self) -> None:
        self._now = 0.0
        self._since: dict[str, tuple[float, bool]] = {}
        """By node: since when it is as it is, and whether that is lost."""
        self._failures = 0
        self._service_s = self._away_s = 0.0

    def read(self, fact: Fact) -> None:
        self._now = max(self._now, _moment(fact))
        if isinstance(fact, NodeIs):
            was_lost = self._settle(fact.view.name)
            self._failures += was_lost is False and fact.is_lost
            self._since[fact.view.name] = self._now, fact.is_lost
        elif isinstance(fact, NodeGone):
            self._settle(fact.name)
            self._since.pop(fact.name, None)

    def _settle(self, name: str) -> bool | None:
        """Count its time up to now. Whether it was lost in it; None for a node that is new."""
        since, is_lost = self._since.get(name, (None, False))
        if since is None:
            return None
        if is_lost:
            self._away_s += self._now - since
        else:
            self._service_s += self._now - since
        return is_lost

    def losses(self) -> Losses:
        for name in self._since:
            self._settle(name)
        return Losses(num_failures=self._failures, service_s=self._service_s, away_s=self._away_s)


def _moment(fact: Fact) -> float:
    match fact:
        case Queued():
            return fact.candidate.submitted_at
        case Placed() | Over() | NodeIs() | NodeGone() | WindowsAre() | Decision():
            return fact.at
        case _:
            return 0.0


def without_losses(workload: Workload) -> Workload:
    """The recorded failures taken back, so that others can be drawn in their place."""
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
