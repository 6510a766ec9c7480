"""When nodes could hold a need at the latest, by the time limits of what runs there.

These times are bounds, not forecasts. A `NodeCalendar` keeps them for one need and asks changed nodes only.
`EarliestStarts` chooses the nodes that can serve a demand first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from itertools import islice
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.model.attempt import NodeTask
from shoal.scheduler.facts.amounts import MILLI, Demand, Need, NodeResources, millicpus_needed
from shoal.scheduler.facts.capacity import Capacity, NodeUse
from shoal.scheduler.placement.fit import fits
from shoal.scheduler.placement.power import FuturePower, first_start_within_power, nodes_within_idle_power
from shoal.scheduler.placement.windows import OpenHours, first_opening


def free_at(need: Need, node: NodeUse) -> float:
    """Return from when a node holds `need` at the latest, if nothing else starts there.

    -infinity: it holds it now. Infinity: the time is unknown.
    """
    if fits(need, node.whole, node.free):
        return -inf
    if need.is_exclusive or (need.num_gpus and not _is_plain(need, node)):
        return next((ends_at for ends_at, free in _steps(node) if fits(need, node.whole, free)), inf)
    # Called for every node when a new need waits at the head, so it uses plain integers and builds nothing.
    millicpus, memory, disk = node.free[:3]
    memory_needed = need.memory_on(node.whole)
    gpus_in_use = _taken(node) if need.num_gpus else set()
    most_in_use = node.whole.num_gpus - need.num_gpus
    for ends_at, task_millicpus, task in node.ends:
        millicpus += task_millicpus
        memory += task.memory_bytes
        disk += task.disk_bytes
        if gpus_in_use:
            gpus_in_use.difference_update(task.gpu_ids)
        if (
            millicpus >= need.millicpus
            and memory >= memory_needed
            and disk >= need.disk_bytes
            and len(gpus_in_use) <= most_in_use
        ):
            return ends_at
    return inf


def free_by(node: NodeUse, at: float) -> NodeResources:
    """Return what is free at `at` if everything that must have ended has ended, and nothing else has."""
    free = node.free
    if not node.view.gpus:
        millicpus, memory, disk = free[:3]
        for ends_at, task_millicpus, task in node.ends:
            if ends_at > at:
                break
            millicpus += task_millicpus
            memory += task.memory_bytes
            disk += task.disk_bytes
        return NodeResources(millicpus, memory, disk, 0, ())
    for ends_at, after in _steps(node):
        if ends_at > at:
            break
        free = after
    return free


def _is_plain(need: Need, node: NodeUse) -> bool:
    """Whether counting whole GPUs is enough: no kind is asked for, no GPU is shared, and there are
    no slices.
    """
    return (
        need.gpu_kind is None
        and need.gpu_milli == MILLI
        and sum(count for _, count in node.whole.gpus) == node.whole.num_gpus
        and all(task.gpu_milli == MILLI for _, _, task in node.ends)
    )


def _taken(node: NodeUse) -> set[int]:
    """Return the indexes of its GPUs that are not free."""
    free = {gpu.index for gpu in node.devices.unused}
    return {gpu.index for gpu in node.view.gpus if gpu.index not in free}


def free_without(node: NodeUse, tasks: Iterable[NodeTask]) -> NodeResources:
    """Return what is free once these tasks are given back."""
    millicpus, memory, disk = node.free[:3]
    back: list[NodeTask] = []
    for task in tasks:
        millicpus += millicpus_needed(task.cpus)
        memory += task.memory_bytes
        disk += task.disk_bytes
        if task.gpu_ids:
            back.append(task)
    devices = node.devices.without(back) if back else node.devices.free
    return NodeResources(millicpus, memory, disk, *devices)


def _steps(node: NodeUse) -> list[tuple[float, NodeResources]]:
    """Return what is free after each end."""
    tasks = (task for _, _, task in node.ends)
    return [(end[0], free) for end, free in zip(node.ends, node.freed(tasks), strict=True)]


MAX_CALENDARS = 64
"""Calendars of needs that stand at the head of a queue now, or did lately."""


class EarliestStart(NamedTuple):
    """The nodes that can serve a demand first, and when the last of them can at the latest."""

    at: float
    nodes: list[str]


class NodeCalendar:
    """For one need: from when each open node that could hold it when empty does hold it."""

    def __init__(self, need: Need, capacity: Capacity) -> None:
        self._need = need
        self._capacity = capacity
        self._num_node_changes = -1
        self._read = -1
        self.names: list[str] = []
        self._places: dict[str, int] = {}
        self._at: NDArray[np.float64] = np.empty(0)

    def times(self) -> NDArray[np.float64]:
        """Return the times in the order of `names`. -infinity: now. Infinity: unknown."""
        journal = self._capacity.changed_nodes
        changed = journal.since(self._read)
        if changed is None or self._num_node_changes != self._capacity.num_node_changes:
            self._read_all()
        else:
            for name in set(changed):
                index = self._places.get(name)
                if index is not None:
                    self._at[index] = free_at(self._need, self._capacity.nodes[name])
        self._read = journal.end
        return self._at

    def _read_all(self) -> None:
        need, nodes = self._need, self._capacity.nodes
        usable = (node for node in nodes.values() if _could_hold(need, node))
        self.names = sorted(node.name for node in usable)
        self._places = {name: index for index, name in enumerate(self.names)}
        self._at = np.array([free_at(need, nodes[name]) for name in self.names], dtype=np.float64)
        self._num_node_changes = self._capacity.num_node_changes


class EarliestStarts:
    """Finds the earliest start of a demand. Keeps a calendar for each need it was asked about lately."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._calendars: dict[Need, NodeCalendar] = {}

    def earliest_start(
        self,
        demand: Demand,
        barred: AbstractSet[str],
        now: float,
        open_hours: OpenHours | None = None,
        future_power: FuturePower | None = None,
    ) -> EarliestStart | None:
        """Return None if the open nodes that are not barred cannot hold the demand even when empty.

        `future_power` is given if racks have caps.
        """
        excluded = barred | demand.excluded if demand.excluded else barred
        if future_power is not None:
            return self._within_power(demand, excluded, now, open_hours, future_power)
        if open_hours is not None:
            waits = list(self._waits(demand.need, excluded))
            if demand.spread is not None:
                waits = self._best_per_domain(demand.spread, waits)
            opening = first_opening(demand, waits, open_hours, self._capacity, now)
            if opening is not None:
                return EarliestStart(*opening)
            # The time is unknown: reserve no node that a window may block at that time.
            excluded = excluded | open_hours.names
        usable = self._waits(demand.need, excluded)
        if demand.within is not None and demand.is_close_required:
            return self._in_one_domain(demand, list(usable), now)
        if demand.spread is not None:
            usable = iter(self._best_per_domain(demand.spread, list(usable)))
        return self._earliest_of(demand, list(islice(usable, demand.min_nodes)), excluded, now)

    def _within_power(
        self,
        demand: Demand,
        barred: AbstractSet[str],
        now: float,
        open_hours: OpenHours | None,
        future_power: FuturePower,
    ) -> EarliestStart | None:
        nodes = self._capacity.nodes
        waits = list(self._waits(demand.need, barred))
        opening = first_start_within_power(demand, waits, open_hours, nodes, future_power, now)
        if opening is not None:
            return EarliestStart(*opening)
        blocked = open_hours.names if open_hours is not None else ()
        timed = [name for at, name in waits if at < inf and name not in blocked]
        untimed = self._emptiest([name for at, name in waits if at == inf and name not in blocked])
        reserved = nodes_within_idle_power(demand, [*timed, *untimed], nodes, future_power)
        return EarliestStart(inf, reserved) if reserved else None

    def _waits(self, need: Need, barred: AbstractSet[str]) -> Iterator[tuple[float, str]]:
        """Yield when each node that is not barred could hold the need, with its name; the earliest first."""
        calendar = self._calendar(need)
        times, names = calendar.times(), calendar.names
        if len(names) == 1:
            return iter(()) if names[0] in barred else iter([(float(times[0]), names[0])])
        waits = ((float(times[index]), names[index]) for index in np.argsort(times, kind="stable"))
        return ((at, name) for at, name in waits if name not in barred) if barred else waits

    def _earliest_of(
        self,
        demand: Demand,
        chosen: list[tuple[float, str]],
        barred: AbstractSet[str],
        now: float,
    ) -> EarliestStart | None:
        if len(chosen) < demand.min_nodes:
            return None
        if chosen[-1][0] < inf:
            return EarliestStart(max(chosen[-1][0], now), [name for _, name in chosen])
        timed, calendar = [name for at, name in chosen if at < inf], self._calendar(demand.need)
        untimed = [
            n for at, n in zip(calendar.times(), calendar.names, strict=True) if at == inf and n not in barred
        ]
        return EarliestStart(inf, timed + self._emptiest(untimed)[: demand.min_nodes - len(timed)])

    def _in_one_domain(
        self, demand: Demand, waits: list[tuple[float, str]], now: float
    ) -> EarliestStart | None:
        """Choose the domain that is ready first. If no time is known, choose the one with the most nodes
        free.
        """
        domains: dict[str, list[tuple[float, str]]] = {}
        for at, name in waits:
            domain = self._capacity.nodes[name].label(demand.within or "")
            if domain is not None:
                domains.setdefault(domain, []).append((at, name))
        if demand.spread is not None:
            domains = {
                domain: self._best_per_domain(demand.spread, waits) for domain, waits in domains.items()
            }
        count = demand.min_nodes
        starts = [(members[count - 1][0], sum(at == inf for at, _ in members[:count]), domain)
                 for domain, members in domains.items() if len(members) >= count]  # fmt: skip
        if not starts:
            return None
        at, _, domain = min(starts)
        members = domains[domain]
        timed = [name for time, name in members if time < inf]
        untimed = self._emptiest([name for time, name in members if time == inf])
        return EarliestStart(max(at, now), (timed + untimed)[:count])

    def _best_per_domain(self, level: str, waits: list[tuple[float, str]]) -> list[tuple[float, str]]:
        """Return the first node of each domain of the level."""
        firsts: dict[str, tuple[float, str]] = {}
        for wait in waits:
            domain = self._capacity.nodes[wait[1]].label(level)
            if domain is not None:
                firsts.setdefault(domain, wait)
        return list(firsts.values())

    def _emptiest(self, names: list[str]) -> list[str]:
        return sorted(names, key=lambda name: _fullness(self._capacity.nodes[name]))

    def _calendar(self, need: Need) -> NodeCalendar:
        calendar = self._calendars.pop(need, None) or NodeCalendar(need, self._capacity)
        if len(self._calendars) >= MAX_CALENDARS:
            del self._calendars[next(iter(self._calendars))]
        self._calendars[need] = calendar
        return calendar


def _could_hold(need: Need, node: NodeUse) -> bool:
    return node.is_open and node.has(need.labels) and fits(need, node.whole, node.whole)


def _fullness(node: NodeUse) -> tuple[int, int, str]:
    return -node.free.num_gpus, -node.free.millicpus, node.name
