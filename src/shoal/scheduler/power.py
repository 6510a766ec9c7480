"""Power as a resource of racks: what is started in a rack together never draws more than its cap.

A node says what it draws in its labels: `idle_watts`, `gpu_watts` for each GPU in use and `cpu_watts` for
each CPU; what it does not say counts as nothing. Caps come with the policy, by the value of the label
`rack`. Idle draw counts whether a node is used or not, for it is drawn either way. All amounts here are
thousandths of watts, so that what is given back leaves exactly nothing behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import ceil

import msgspec

from shoal.model.attempt import Allocation, NodeShare
from shoal.model.node import watts_of
from shoal.scheduler.amounts import MILLI, Need
from shoal.scheduler.snapshot import NodeView

RACK = "rack"

Watts = Mapping[str, int]
"""Thousandths of watts, by capped rack."""


class OverCap(msgspec.Struct, frozen=True, kw_only=True):
    """A rack that has no power left for one node more of what is asked."""

    rack: str
    cap_watts: float
    drawn_watts: float


class Power:
    """What each capped rack draws with all that is held there. Without caps it costs nothing."""

    def __init__(self, caps: Mapping[str, float]) -> None:
        self._caps = {rack: int(watts * MILLI) for rack, watts in caps.items()}
        self.racks: dict[str, str] = {}
        """Of the nodes that are in a capped one."""
        self._nodes: dict[str, NodeView] = {}
        self._drawn: dict[str, int] = dict.fromkeys(caps, 0)
        self._idle: dict[str, int] = dict.fromkeys(caps, 0)

    @property
    def has_caps(self) -> bool:
        return bool(self._caps)

    def rebuild(self, nodes: Iterable[NodeView], allocations: Iterable[Allocation]) -> None:
        """From what there is: when nodes came, went or changed."""
        self.racks, self._nodes, self._idle = {}, {}, dict.fromkeys(self._caps, 0)
        for view in nodes:
            rack = view.labels.get(RACK)
            if rack in self._caps:
                self.racks[view.name], self._nodes[view.name] = rack, view
                self._idle[rack] += _milliwatts(view, "idle_watts", 1.0)
        self._drawn = dict(self._idle)
        for allocation in allocations:
            self.take(allocation, 1)

    def take(self, allocation: Allocation, sign: int) -> None:
        """Held (1) or given back (-1)."""
        for rack, drawn in self.of_shares(allocation).items():
            self._drawn[rack] += sign * drawn

    def left(self) -> dict[str, int]:
        """What each rack may draw more now."""
        return {rack: cap - self._drawn[rack] for rack, cap in self._caps.items()}

    def left_when_idle(self) -> dict[str, int]:
        """What each rack may draw more while nothing runs."""
        return {rack: cap - self._idle[rack] for rack, cap in self._caps.items()}

    def full(self, need: Need, left: Watts) -> frozenset[str]:
        """Nodes of racks that have no power for one node more of it, if that is what is left."""
        return frozenset(name for name, rack in self.racks.items() if self.of_need(need, name) > left[rack])

    def within(self, names: Iterable[str], need: Need, left: Watts) -> list[str]:
        """As many of them, the first first, as that is enough for together."""
        rest, kept = dict(left), []
        for name in names:
            rack = self.racks.get(name)
            if rack is not None:
                rest[rack] -= self.of_need(need, name)
                if rest[rack] < 0:
                    rest[rack] += self.of_need(need, name)
                    continue
            kept.append(name)
        return kept

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
        view = self._nodes.get(name)
        if view is None:
            return 0
        if need.is_exclusive:
            return self._draws(name, float(len(view.gpus)), view.cpus)
        return self._draws(name, need.num_gpus * need.gpu_milli / MILLI, need.millicpus / MILLI)

    def _of_share(self, share: NodeShare) -> int:
        return self._draws(share.node, len(share.gpu_ids) * share.gpu_milli / MILLI, share.cpus)

    def _draws(self, name: str, gpus: float, cpus: float) -> int:
        view = self._nodes[name]
        return _milliwatts(view, "gpu_watts", gpus) + _milliwatts(view, "cpu_watts", cpus)


def _milliwatts(view: NodeView, label: str, count: float) -> int:
    """Rounded up. A label that is no number counts as nothing: its node is closed."""
    return ceil((watts_of(view.labels, label) or 0.0) * count * MILLI)
