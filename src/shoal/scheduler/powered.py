"""Who may start, and when, where racks may draw only so much: nodes and power at the same moment.

Power is looked at like nodes: what runs gives it back by its time limit, what is promised keeps it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, groupby
from math import inf

from shoal.scheduler.amounts import Demand
from shoal.scheduler.capacity import NodeUse
from shoal.scheduler.gang import apart, gathered, split
from shoal.scheduler.openings import Opening, Wait
from shoal.scheduler.power import Power, Watts
from shoal.scheduler.windows import Hours

Nodes = Mapping[str, NodeUse]


def choose_powered(demand: Demand, names: list[str], nodes: Nodes, power: Power, left: Watts) -> list[str]:
    """Of nodes that could all serve, the best first, those that do it together on what is left of power;
    empty when none do.

    First those that would be chosen without caps; then, whichever draw least.
    """
    need = demand.need
    full = power.full(need, left)
    usable = [name for name in names if name not in full]
    found = power.within(gathered(demand, usable, nodes), need, left)
    if len(found) >= demand.min_nodes:
        return found
    thrifty = power.thrifty(usable, need)
    is_close = demand.within is not None and demand.is_close_required
    domains = split(thrifty, demand.within or "", nodes) if is_close else {"": thrifty}
    for _, members in sorted(domains.items()):
        found = power.within(apart(demand, members, nodes), need, left, demand.max_nodes)
        if len(found) >= demand.min_nodes:
            return found
    return []


class PowerAhead:
    """What racks may draw more later, by the time limits of what runs there and beside what is promised."""

    def __init__(self, power: Power, kept: Watts) -> None:
        self.power = power
        self._kept = kept
        self._times = {rack: [at for at, _ in ends] for rack, ends in power.ends.items()}
        self._given = {
            rack: list(accumulate((watts for _, watts in ends), initial=0))
            for rack, ends in power.ends.items()
        }

    def moments(self) -> set[float]:
        """When any of it is given back, as far as is known."""
        return {at for times in self._times.values() for at in times if at < inf}

    def left(self, at: float) -> dict[str, int]:
        """Once everything that must have ended by then has, and nothing else."""
        return {
            rack: watts - self._kept.get(rack, 0) + self._given_by(rack, at)
            for rack, watts in self.power.left().items()
        }

    def left_at_last(self) -> dict[str, int]:
        """Once nothing runs."""
        idle = self.power.left_when_idle()
        return {rack: watts - self._kept.get(rack, 0) for rack, watts in idle.items()}

    def _given_by(self, rack: str, at: float) -> int:
        return self._given[rack][bisect_right(self._times[rack], at)]


def first_powered(
    demand: Demand, waits: Sequence[Wait], hours: Hours | None, nodes: Nodes, ahead: PowerAhead, now: float
) -> Opening | None:
    """The first moment at which enough nodes are free, none would meet a window, and there is power for them.
    `waits`: the soonest first.

    Between two moments at which a window opens or closes a start, whatever fits goes on to fit: so it is
    enough to look at the last moment, and then to halve.
    """
    known = [name for at, name in waits if at < inf]
    since = [max(at, now) for at, _ in waits if at < inf]
    moments = set(since) | {max(at, now) for at in ahead.moments()}
    if hours is not None:
        moments |= {at for at in hours.opens if at > now}

    def chosen(at: float) -> list[str]:
        ready = known[: bisect_right(since, at)]
        if hours is not None:
            ready = [name for name in ready if hours.is_open(name, at)]
        return choose_powered(demand, ready, nodes, ahead.power, ahead.left(at))

    for _, alike in groupby(sorted(moments), key=lambda at: _between(hours, at)):
        same = list(alike)
        if chosen(same[-1]):
            at = same[bisect_left(same, 1, key=lambda moment: len(chosen(moment)))]
            return at, chosen(at)[: demand.min_nodes]
    return None


def last_powered(demand: Demand, names: Collection[str], nodes: Nodes, ahead: PowerAhead) -> list[str]:
    """The nodes to keep where nobody knows when; empty when there will never be power for it."""
    return choose_powered(demand, list(names), nodes, ahead.power, ahead.left_at_last())[: demand.min_nodes]


def _between(hours: Hours | None, at: float) -> tuple[int, int]:
    return (0, 0) if hours is None else (bisect_right(hours.opens, at), bisect_left(hours.closes, at))
