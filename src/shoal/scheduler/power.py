"""Power as a resource of racks: what is started in a rack together never draws more than its cap.

A node says what it draws in its labels: `idle_watts`, `gpu_watts` for each GPU in use and `cpu_watts` for
each CPU; what it does not say counts as nothing. Caps come with the policy, by the value of the label
`rack`. Idle draw counts whether a node is used or not, for it is drawn either way. All amounts here are
thousandths of watts, so that what is given back leaves exactly nothing behind.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping
from math import ceil, inf
from typing import NamedTuple

import msgspec

from shoal.model.attempt import NodeShare
from shoal.model.node import watts_of
from shoal.scheduler.amounts import MILLI, Need
from shoal.scheduler.capacity import ends_at
from shoal.scheduler.snapshot import Holding, NodeView
from shoal.scheduler.words import listed, quoted

RACK = "rack"

Watts = Mapping[str, int]
"""Thousandths of watts, by capped rack."""


class Draws(NamedTuple):
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
    """A rack that has no power left for one node more of what is asked."""

    rack: str
    cap_watts: float
    drawn_watts: float


class Power:
    """What each capped rack draws with all that is held there. Without caps it costs nothing."""

    def __init__(self, caps: Mapping[str, float]) -> None:
        self.has_caps = bool(caps)
        self._caps = {rack: int(watts * MILLI) for rack, watts in caps.items()}
        self.racks: dict[str, str] = {}
        """Of the nodes that are in a capped one."""
        self._draws: dict[str, Draws] = {}
        self._alike: dict[Draws, dict[str, frozenset[str]]] = {}
        """Nodes that draw alike, by rack."""
        self._drawn: dict[str, int] = dict.fromkeys(caps, 0)
        self._idle: dict[str, int] = dict.fromkeys(caps, 0)
        self.ends: dict[str, list[tuple[float, int]]] = {rack: [] for rack in caps}
        """By rack, until when what is held there may be at the latest, and what it draws; sorted."""

    def rebuild(self, nodes: Iterable[NodeView], holdings: Iterable[Holding]) -> None:
        """From what there is: when nodes came, went or changed."""
        self.racks, self._draws, self._idle = {}, {}, dict.fromkeys(self._caps, 0)
        alike: dict[Draws, dict[str, list[str]]] = {}
        for view in nodes:
            rack = view.labels.get(RACK)
            if rack in self._caps:
                draws = _draws_of(view)
                self.racks[view.name], self._draws[view.name] = rack, draws
                self._idle[rack] += _milliwatts(_watts(view, "idle_watts"))
                alike.setdefault(draws, {}).setdefault(rack, []).append(view.name)
        self._alike = {
            draws: {rack: frozenset(names) for rack, names in racks.items()} for draws, racks in alike.items()
        }
        self._drawn = dict(self._idle)
        self.ends = {rack: [] for rack in self._caps}
        for holding in holdings:
            self.take(holding)

    def take(self, holding: Holding) -> None:
        until = ends_at(holding)
        for rack, drawn in self.of_shares(holding.allocation).items():
            self._drawn[rack] += drawn
            insort(self.ends[rack], (until, drawn))

    def give(self, holding: Holding) -> None:
        """It holds nothing any more of what it took."""
        until = ends_at(holding)
        for rack, drawn in self.of_shares(holding.allocation).items():
            self._drawn[rack] -= drawn
            del self.ends[rack][bisect_left(self.ends[rack], (until, drawn))]

    def left(self) -> dict[str, int]:
        """What each rack may draw more now."""
        return {rack: cap - self._drawn[rack] for rack, cap in self._caps.items()}

    def left_when_idle(self) -> dict[str, int]:
        """What each rack may draw more while nothing runs."""
        return {rack: cap - self._idle[rack] for rack, cap in self._caps.items()}

    def full(self, need: Need, left: Watts) -> frozenset[str]:
        """Nodes of racks that have no power for one node more of it, if that is what is left."""
        full = []
        for draws, racks in self._alike.items():
            asked = draws.of_need(need)
            full += [names for rack, names in racks.items() if asked > left[rack]]
        return frozenset().union(*full)

    def within(self, names: Iterable[str], need: Need, left: Watts, most: float = inf) -> list[str]:
        """As many of them, the first first and no more than `most`, as that is enough for together."""
        rest, kept = dict(left), list[str]()
        asked = {draws: draws.of_need(need) for draws in self._alike}
        for name in names:
            if len(kept) >= most:
                break
            rack = self.racks.get(name)
            if rack is not None:
                drawn = asked[self._draws[name]]
                if drawn > rest[rack]:
                    continue
                rest[rack] -= drawn
            kept.append(name)
        return kept

    def thrifty(self, names: Iterable[str], need: Need) -> list[str]:
        """The same nodes, those first on which it draws least."""
        asked = {draws: draws.of_need(need) for draws in self._alike}
        return sorted(names, key=lambda name: asked[self._draws[name]] if name in self._draws else 0)

    def over(self, need: Need, names: Iterable[str]) -> OverCap | None:
        """The first rack, by name, that keeps any of the nodes from it."""
        full = self.full(need, self.left())
        racks = sorted({self.racks[name] for name in names if name in full})
        if not racks:
            return None
        rack = racks[0]
        return OverCap(rack=rack, cap_watts=self._caps[rack] / MILLI, drawn_watts=self._drawn[rack] / MILLI)

    def of_shares(self, shares: Iterable[NodeShare]) -> Counter[str]:
        """What they draw in each capped rack."""
        drawn: Counter[str] = Counter()
        for share in shares:
            if share.node in self.racks:
                drawn[self.racks[share.node]] += self._of_share(share)
        return drawn

    def of_nodes(self, need: Need, names: Iterable[str]) -> Counter[str]:
        """What it draws in each capped rack on these nodes."""
        drawn: Counter[str] = Counter()
        for name in names:
            if name in self.racks:
                drawn[self.racks[name]] += self.of_need(need, name)
        return drawn

    def of_need(self, need: Need, name: str) -> int:
        """What it draws on a node; nothing where that has no cap."""
        draws = self._draws.get(name)
        return 0 if draws is None else draws.of_need(need)

    def _of_share(self, share: NodeShare) -> int:
        return self._draws[share.node].of(len(share.gpu_ids) * share.gpu_milli / MILLI, share.cpus)


def unknown_racks(caps: Iterable[str], labels: Iterable[Mapping[str, str]]) -> str | None:
    """Names racks that have a cap and no node, and those that have nodes; None when each has one."""
    racks = {told[RACK] for told in labels if RACK in told}
    missing = sorted(set(caps) - racks)
    if not missing:
        return None
    there = f"nodes are in {listed(quoted(sorted(racks)))}" if racks else "no node says which rack it is in"
    return f"`power_caps`: no node has the label `{RACK}` with {listed(quoted(missing))}; {there}"


def _draws_of(view: NodeView) -> Draws:
    return Draws(_watts(view, "gpu_watts"), _watts(view, "cpu_watts"), len(view.gpus), view.cpus)


def _watts(view: NodeView, label: str) -> float:
    """A label that is no number counts as nothing: its node is closed."""
    return watts_of(view.labels, label) or 0.0


def _milliwatts(watts: float) -> int:
    """Rounded up."""
    return ceil(watts * MILLI)
