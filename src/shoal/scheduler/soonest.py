"""When each node could hold a need at the latest, kept up to date: only changed nodes are asked again."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from itertools import islice
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.scheduler.amounts import Demand, Need
from shoal.scheduler.capacity import Capacity, NodeUse
from shoal.scheduler.fit import fits
from shoal.scheduler.openings import first_opening
from shoal.scheduler.powered import PowerAhead, first_powered, last_powered
from shoal.scheduler.release import free_at
from shoal.scheduler.windows import Hours

MAX_CALENDARS = 64
"""Needs that stand at the head of a queue now or did lately."""


class Turn(NamedTuple):
    """The nodes that serve a demand first, and when the last of them does at the latest."""

    at: float
    nodes: list[str]


class Calendar:
    """Of one need: for every open node that could hold it when empty, from when it does."""

    def __init__(self, need: Need, capacity: Capacity) -> None:
        self._need = need
        self._capacity = capacity
        self._num_node_changes = -1
        self._read = -1
        self.names: list[str] = []
        self._places: dict[str, int] = {}
        self._at: NDArray[np.float64] = np.empty(0)

    def times(self) -> NDArray[np.float64]:
        """In the order of `names`; -infinity: now, infinity: nobody knows."""
        touched = self._capacity.touched
        changed = touched.since(self._read)
        if changed is None or self._num_node_changes != self._capacity.num_node_changes:
            self._read_all()
        else:
            for name in set(changed):
                place = self._places.get(name)
                if place is not None:
                    self._at[place] = free_at(self._need, self._capacity.nodes[name])
        self._read = touched.end
        return self._at

    def _read_all(self) -> None:
        need, nodes = self._need, self._capacity.nodes
        usable = (node for node in nodes.values() if _could_hold(need, node))
        self.names = sorted(node.name for node in usable)
        self._places = {name: place for place, name in enumerate(self.names)}
        self._at = np.array([free_at(need, nodes[name]) for name in self.names], dtype=np.float64)
        self._num_node_changes = self._capacity.num_node_changes


class Soonest:
    """Turns for demands. Remembers a calendar for each need it was asked about lately."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._calendars: dict[Need, Calendar] = {}

    def turn(
        self,
        demand: Demand,
        barred: AbstractSet[str],
        now: float,
        hours: Hours | None = None,
        ahead: PowerAhead | None = None,
    ) -> Turn | None:
        """None when the open nodes that are not barred cannot hold it even when empty. `ahead`: where racks
        have caps.
        """
        out = barred | demand.excluded if demand.excluded else barred
        if ahead is not None:
            return self._powered(demand, out, now, hours, ahead)
        if hours is not None:
            waits = list(self._waits(demand.need, out))
            if demand.spread is not None:
                waits = self._apart(demand.spread, waits)
            opening = first_opening(demand, waits, hours, self._capacity, now)
            if opening is not None:
                return Turn(*opening)
            # Nobody knows when: no node is kept for somebody who may find it shut then.
            out = out | hours.names
        usable = self._waits(demand.need, out)
        if demand.within is not None and demand.is_close_required:
            return self._inside_one(demand, list(usable), now)
        if demand.spread is not None:
            usable = iter(self._apart(demand.spread, list(usable)))
        return self._turn(demand, list(islice(usable, demand.min_nodes)), out, now)

    def _powered(
        self, demand: Demand, out: AbstractSet[str], now: float, hours: Hours | None, ahead: PowerAhead
    ) -> Turn | None:
        nodes = self._capacity.nodes
        waits = list(self._waits(demand.need, out))
        opening = first_powered(demand, waits, hours, nodes, ahead, now)
        if opening is not None:
            return Turn(*opening)
        shut = hours.names if hours is not None else ()
        known = [name for at, name in waits if at < inf and name not in shut]
        unknown = self._emptiest([name for at, name in waits if at == inf and name not in shut])
        kept = last_powered(demand, [*known, *unknown], nodes, ahead)
        return Turn(inf, kept) if kept else None

    def _waits(self, need: Need, out: AbstractSet[str]) -> Iterator[tuple[float, str]]:
        """When each node that is not `out` could hold the need, and its name; the soonest first."""
        calendar = self._calendar(need)
        times, names = calendar.times(), calendar.names
        if len(names) == 1:
            return iter(()) if names[0] in out else iter([(float(times[0]), names[0])])
        waits = ((float(times[place]), names[place]) for place in np.argsort(times, kind="stable"))
        return ((at, name) for at, name in waits if name not in out) if out else waits

    def _turn(
        self,
        demand: Demand,
        chosen: list[tuple[float, str]],
        out: AbstractSet[str],
        now: float,
    ) -> Turn | None:
        if len(chosen) < demand.min_nodes:
            return None
        if chosen[-1][0] < inf:
            return Turn(max(chosen[-1][0], now), [name for _, name in chosen])
        known, calendar = [name for at, name in chosen if at < inf], self._calendar(demand.need)
        unknown = [
            n for at, n in zip(calendar.times(), calendar.names, strict=True) if at == inf and n not in out
        ]
        return Turn(inf, known + self._emptiest(unknown)[: demand.min_nodes - len(known)])

    def _inside_one(self, demand: Demand, waits: list[tuple[float, str]], now: float) -> Turn | None:
        """In the domain that is ready first; where nobody knows when, the one with the most nodes free."""
        domains: dict[str, list[tuple[float, str]]] = {}
        for at, name in waits:
            domain = self._capacity.nodes[name].label(demand.within or "")
            if domain is not None:
                domains.setdefault(domain, []).append((at, name))
        if demand.spread is not None:
            domains = {domain: self._apart(demand.spread, waits) for domain, waits in domains.items()}
        count = demand.min_nodes
        turns = [(members[count - 1][0], sum(at == inf for at, _ in members[:count]), domain)
                 for domain, members in domains.items() if len(members) >= count]  # fmt: skip
        if not turns:
            return None
        at, _, domain = min(turns)
        members = domains[domain]
        known = [name for time, name in members if time < inf]
        unknown = self._emptiest([name for time, name in members if time == inf])
        return Turn(max(at, now), (known + unknown)[:count])

    def _apart(self, level: str, waits: list[tuple[float, str]]) -> list[tuple[float, str]]:
        """The first of each domain of the level."""
        firsts: dict[str, tuple[float, str]] = {}
        for wait in waits:
            domain = self._capacity.nodes[wait[1]].label(level)
            if domain is not None:
                firsts.setdefault(domain, wait)
        return list(firsts.values())

    def _emptiest(self, names: list[str]) -> list[str]:
        return sorted(names, key=lambda name: _fullness(self._capacity.nodes[name]))

    def _calendar(self, need: Need) -> Calendar:
        calendar = self._calendars.pop(need, None) or Calendar(need, self._capacity)
        if len(self._calendars) >= MAX_CALENDARS:
            del self._calendars[next(iter(self._calendars))]
        self._calendars[need] = calendar
        return calendar


def _could_hold(need: Need, node: NodeUse) -> bool:
    return node.is_open and node.has(need.labels) and fits(need, node.whole, node.whole)


def _fullness(node: NodeUse) -> tuple[int, int, str]:
    return -node.free.num_gpus, -node.free.millicpus, node.name
