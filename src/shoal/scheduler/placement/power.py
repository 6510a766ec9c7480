"""Power as a resource of racks: the jobs started in a rack together never draw more than its cap.

A node states what it draws in its labels: `idle_watts`, `gpu_watts` for each GPU in use and `cpu_watts` for
each CPU. What it does not state counts as nothing. Caps come with the policy, by the value of the label
`rack`. Idle draw counts whether a node is used or not, because it is drawn either way. All amounts here are
thousandths of watts, so that releasing everything leaves exactly zero.

`FuturePower` treats power like nodes: a running job releases it by its time limit, and a promised start
reserves it. `first_start_within_power` finds a start at which nodes and power are free together.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, groupby
from math import ceil, inf
from typing import NamedTuple

import msgspec

from shoal.model.attempt import NodeTask
from shoal.model.node import watts_of
from shoal.scheduler.explain.text import listed, quoted
from shoal.scheduler.facts.amounts import MILLI, Demand, Need
from shoal.scheduler.facts.capacity import NodeUse, ends_at
from shoal.scheduler.facts.snapshot import Holding, NodeInfo
from shoal.scheduler.placement.gang import best_per_domain, choose_together, split_by_domain
from shoal.scheduler.placement.windows import NodeFreeAt, OpenHours, Opening

RACK = "rack"

RackMilliwatts = Mapping[str, int]
"""Thousandths of watts, by capped rack."""


class PowerRates(NamedTuple):
    """What a node draws for each GPU and CPU in use, in watts, and how many of them it has."""

    gpu_watts: float
    cpu_watts: float
    num_gpus: int
    cpus: float

    def of(self, gpus: float, cpus: float) -> int:
        return _milliwatts(self.gpu_watts * gpus) + _milliwatts(self.cpu_watts * cpus)

    def of_need(self, need: Need) -> int:
        if need.is_exclusive:
            return self.of(float(self.num_gpus), self.cpus)
        return self.of(need.num_gpus * need.gpu_milli / MILLI, need.millicpus / MILLI)


class OverCap(msgspec.Struct, frozen=True, kw_only=True):
    """A rack that has no power left for one more node of what is asked."""

    rack: str
    cap_watts: float
    drawn_watts: float


class RackPower:
    """What each capped rack draws with all that is held there. Without caps it costs nothing."""

    def __init__(self, caps: Mapping[str, float]) -> None:
        self.has_caps = bool(caps)
        self._caps = {rack: int(watts * MILLI) for rack, watts in caps.items()}
        self.racks: dict[str, str] = {}
        """The rack of each node that is in a capped one."""
        self._rates: dict[str, PowerRates] = {}
        self._alike: dict[PowerRates, dict[str, frozenset[str]]] = {}
        """Nodes with equal power rates, by rack."""
        self._drawn: dict[str, int] = dict.fromkeys(caps, 0)
        self._idle: dict[str, int] = dict.fromkeys(caps, 0)
        self.ends: dict[str, list[tuple[float, int]]] = {rack: [] for rack in caps}
        """By rack: until when each holding there may last at the latest, and what it draws; sorted."""

    def rebuild(self, nodes: Iterable[NodeInfo], holdings: Iterable[Holding]) -> None:
        """Compute everything again, after nodes were added, dropped or changed."""
        self.racks, self._rates, self._idle = {}, {}, dict.fromkeys(self._caps, 0)
        by_rates: dict[PowerRates, dict[str, list[str]]] = {}
        for view in nodes:
            rack = view.labels.get(RACK)
            if rack in self._caps:
                rates = _power_rates(view)
                self.racks[view.name], self._rates[view.name] = rack, rates
                self._idle[rack] += _milliwatts(_watts(view, "idle_watts"))
                by_rates.setdefault(rates, {}).setdefault(rack, []).append(view.name)
        self._alike = {
            rates: {rack: frozenset(names) for rack, names in racks.items()}
            for rates, racks in by_rates.items()
        }
        self._drawn = dict(self._idle)
        self.ends = {rack: [] for rack in self._caps}
        for holding in holdings:
            self.take(holding)

    def take(self, holding: Holding) -> None:
        until = ends_at(holding)
        for rack, drawn in self.of_tasks(holding.allocation).items():
            self._drawn[rack] += drawn
            insort(self.ends[rack], (until, drawn))

    def give(self, holding: Holding) -> None:
        """The attempt holds nothing of what it took."""
        until = ends_at(holding)
        for rack, drawn in self.of_tasks(holding.allocation).items():
            self._drawn[rack] -= drawn
            del self.ends[rack][bisect_left(self.ends[rack], (until, drawn))]

    def left(self) -> dict[str, int]:
        """Return what each rack may draw more now."""
        return {rack: cap - self._drawn[rack] for rack, cap in self._caps.items()}

    def left_when_idle(self) -> dict[str, int]:
        """Return what each rack may draw more while nothing runs."""
        return {rack: cap - self._idle[rack] for rack, cap in self._caps.items()}

    def full(self, need: Need, left: RackMilliwatts) -> frozenset[str]:
        """Return the nodes of racks in which `left` is too little for one more node of the need."""
        full = []
        for rates, racks in self._alike.items():
            needed = rates.of_need(need)
            full += [names for rack, names in racks.items() if needed > left[rack]]
        return frozenset().union(*full)

    def within(self, names: Iterable[str], need: Need, left: RackMilliwatts, most: float = inf) -> list[str]:
        """Return as many of the nodes, in order and at most `most`, as `left` is enough for together."""
        remaining, chosen = dict(left), list[str]()
        by_rates = {rates: rates.of_need(need) for rates in self._alike}
        for name in names:
            if len(chosen) >= most:
                break
            rack = self.racks.get(name)
            if rack is not None:
                drawn = by_rates[self._rates[name]]
                if drawn > remaining[rack]:
                    continue
                remaining[rack] -= drawn
            chosen.append(name)
        return chosen

    def sorted_by_draw(self, names: Iterable[str], need: Need) -> list[str]:
        """Return the same nodes, those first on which the need draws least."""
        by_rates = {rates: rates.of_need(need) for rates in self._alike}
        return sorted(names, key=lambda name: by_rates[self._rates[name]] if name in self._rates else 0)

    def over(self, need: Need, names: Iterable[str]) -> OverCap | None:
        """Return the first rack, by name, that keeps the need from any of the nodes."""
        full = self.full(need, self.left())
        racks = sorted({self.racks[name] for name in names if name in full})
        if not racks:
            return None
        rack = racks[0]
        return OverCap(rack=rack, cap_watts=self._caps[rack] / MILLI, drawn_watts=self._drawn[rack] / MILLI)

    def of_tasks(self, tasks: Iterable[NodeTask]) -> Counter[str]:
        """Return what the tasks draw in each capped rack."""
        drawn: Counter[str] = Counter()
        for task in tasks:
            if task.node in self.racks:
                drawn[self.racks[task.node]] += self._of_task(task)
        return drawn

    def of_nodes(self, need: Need, names: Iterable[str]) -> Counter[str]:
        """Return what the need draws in each capped rack on these nodes."""
        drawn: Counter[str] = Counter()
        for name in names:
            if name in self.racks:
                drawn[self.racks[name]] += self.of_need(need, name)
        return drawn

    def of_need(self, need: Need, name: str) -> int:
        """Return what the need draws on a node; nothing if its rack has no cap."""
        rates = self._rates.get(name)
        return 0 if rates is None else rates.of_need(need)

    def _of_task(self, task: NodeTask) -> int:
        return self._rates[task.node].of(len(task.gpu_ids) * task.gpu_milli / MILLI, task.cpus)


def unknown_racks(caps: Iterable[str], labels: Iterable[Mapping[str, str]]) -> str | None:
    """Name racks that have a cap and no node, and the racks that have nodes; None if each cap has a node."""
    racks = {node_labels[RACK] for node_labels in labels if RACK in node_labels}
    missing = sorted(set(caps) - racks)
    if not missing:
        return None
    available = (
        f"nodes are in {listed(quoted(sorted(racks)))}" if racks else "no node says which rack it is in"
    )
    return f"`power_caps`: no node has the label `{RACK}` with {listed(quoted(missing))}; {available}"


def _power_rates(view: NodeInfo) -> PowerRates:
    return PowerRates(_watts(view, "gpu_watts"), _watts(view, "cpu_watts"), len(view.gpus), view.cpus)


def _watts(view: NodeInfo, label: str) -> float:
    """A label that is not a number counts as nothing, and its node is closed."""
    return watts_of(view.labels, label) or 0.0


def _milliwatts(watts: float) -> int:
    """Round up."""
    return ceil(watts * MILLI)


Nodes = Mapping[str, NodeUse]


def choose_within_power(
    demand: Demand, names: list[str], nodes: Nodes, power: RackPower, left: RackMilliwatts
) -> list[str]:
    """Return, of nodes that could all serve (the best first), those that can serve as one gang on the power
    that is left; empty if none can.

    Try the nodes that would be chosen without caps first, then those that draw least.
    """
    need = demand.need
    full = power.full(need, left)
    usable = [name for name in names if name not in full]
    chosen = power.within(choose_together(demand, usable, nodes), need, left)
    if len(chosen) >= demand.min_nodes:
        return chosen
    thrifty = power.sorted_by_draw(usable, need)
    is_close = demand.within is not None and demand.is_close_required
    domains = split_by_domain(thrifty, demand.within or "", nodes) if is_close else {"": thrifty}
    for _, members in sorted(domains.items()):
        chosen = power.within(best_per_domain(demand, members, nodes), need, left, demand.max_nodes)
        if len(chosen) >= demand.min_nodes:
            return chosen
    return []


class FuturePower:
    """What racks may draw more later, by the time limits of running jobs and beside what is promised."""

    def __init__(self, power: RackPower, reserved: RackMilliwatts) -> None:
        self.power = power
        self._reserved = reserved
        self._times = {rack: [at for at, _ in ends] for rack, ends in power.ends.items()}
        self._released = {
            rack: list(accumulate((watts for _, watts in ends), initial=0))
            for rack, ends in power.ends.items()
        }

    def moments(self) -> set[float]:
        """Return when any of it is released, if known."""
        return {at for times in self._times.values() for at in times if at < inf}

    def left(self, at: float) -> dict[str, int]:
        """Return what is left at `at` if everything that must have ended has ended, and nothing else has."""
        return {
            rack: watts - self._reserved.get(rack, 0) + self._released_by(rack, at)
            for rack, watts in self.power.left().items()
        }

    def left_at_last(self) -> dict[str, int]:
        """Return what is left once nothing runs."""
        idle = self.power.left_when_idle()
        return {rack: watts - self._reserved.get(rack, 0) for rack, watts in idle.items()}

    def _released_by(self, rack: str, at: float) -> int:
        return self._released[rack][bisect_right(self._times[rack], at)]


def first_start_within_power(
    demand: Demand,
    waits: Sequence[NodeFreeAt],
    open_hours: OpenHours | None,
    nodes: Nodes,
    future_power: FuturePower,
    now: float,
) -> Opening | None:
    """Return the first time at which enough nodes are free, none would meet a window, and there is power for
    them.

    `waits`: the earliest first. Between two times at which a window opens or closes a start, a gang that fits
    continues to fit. So it is enough to check the last time of each interval and then to bisect.
    """
    timed = [name for at, name in waits if at < inf]
    since = [max(at, now) for at, _ in waits if at < inf]
    moments = set(since) | {max(at, now) for at in future_power.moments()}
    if open_hours is not None:
        moments |= {at for at in open_hours.opens if at > now}

    def chosen(at: float) -> list[str]:
        ready = timed[: bisect_right(since, at)]
        if open_hours is not None:
            ready = [name for name in ready if open_hours.is_open(name, at)]
        return choose_within_power(demand, ready, nodes, future_power.power, future_power.left(at))

    for _, moments_between in groupby(sorted(moments), key=lambda at: _between(open_hours, at)):
        ordered = list(moments_between)
        if chosen(ordered[-1]):
            at = ordered[bisect_left(ordered, 1, key=lambda moment: len(chosen(moment)))]
            return at, chosen(at)[: demand.min_nodes]
    return None


def nodes_within_idle_power(
    demand: Demand, names: Collection[str], nodes: Nodes, future_power: FuturePower
) -> list[str]:
    """Return the nodes to reserve if the time is unknown; empty if there will never be power for
    the demand.
    """
    return choose_within_power(demand, list(names), nodes, future_power.power, future_power.left_at_last())[
        : demand.min_nodes
    ]


def _between(open_hours: OpenHours | None, at: float) -> tuple[int, int]:
    return (
        (0, 0)
        if open_hours is None
        else (bisect_right(open_hours.opens, at), bisect_left(open_hours.closes, at))
    )
