"""Power as a resource of racks: what is started in a rack together never draws more than its cap.

A node says what it draws in its labels: `idle_watts`, `gpu_watts` for each GPU in use and `cpu_watts` for
each CPU; what it does not say counts as nothing. Caps come with the policy, by the value of the label
`rack`. Idle draw counts whether a node is used or not, for it is drawn either way. Promised starts and
rooms made by evictions do not look at power: a job may find its rack short of it then, and waits on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil, inf

import msgspec

from shoal.model.attempt import Allocation, NodeShare
from shoal.scheduler.amounts import MILLI, Need
from shoal.scheduler.snapshot import NodeView

RACK = "rack"


class OverCap(msgspec.Struct, frozen=True, kw_only=True):
    """A rack that has no power left for one node more of what is asked."""

    rack: str
    cap_watts: float
    drawn_watts: float


class Power:
    """What each capped rack draws with all that is held there. Without caps it costs nothing."""

    def __init__(self, caps: Mapping[str, float]) -> None:
        self._caps = {rack: int(watts * MILLI) for rack, watts in caps.items()}
        self._racks: dict[str, str] = {}
        self._nodes: dict[str, NodeView] = {}
        self._drawn: dict[str, int] = dict.fromkeys(caps, 0)
        """Thousandths of watts, so that what is given back leaves exactly nothing behind."""

    @property
    def has_caps(self) -> bool:
        return bool(self._caps)

    def rebuild(self, nodes: Iterable[NodeView], allocations: Iterable[Allocation]) -> None:
        """From what there is: when nodes came, went or changed."""
        self._racks, self._nodes, self._drawn = {}, {}, dict.fromkeys(self._caps, 0)
        for view in nodes:
            rack = view.labels.get(RACK)
            if rack in self._caps:
                self._racks[view.name], self._nodes[view.name] = rack, view
                self._drawn[rack] += _milliwatts(view, "idle_watts", 1.0)
        for allocation in allocations:
            self.take(allocation, 1)

    def take(self, allocation: Allocation, sign: int) -> None:
        """Held (1) or given back (-1)."""
        for share in allocation:
            rack = self._racks.get(share.node)
            if rack is not None:
                self._drawn[rack] += sign * self._of_share(share)

    def full(self, need: Need) -> frozenset[str]:
        """Nodes of racks that have no power for one node more of it."""
        return frozenset(
            name
            for name, rack in self._racks.items()
            if self._drawn[rack] + self._of_need(need, name) > self._caps[rack]
        )

    def within(self, names: list[str], need: Need) -> list[str]:
        """As many of them, the first first, as the racks have power for together."""
        drawn, kept = dict(self._drawn), []
        for name in names:
            rack = self._racks.get(name)
            if rack is not None:
                if drawn[rack] + self._of_need(need, name) > self._caps[rack]:
                    continue
                drawn[rack] += self._of_need(need, name)
            kept.append(name)
        return kept

    def over(self, need: Need, names: Iterable[str]) -> OverCap | None:
        """The first rack, by name, that keeps any of the nodes from it."""
        full = self.full(need)
        racks = sorted({self._racks[name] for name in names if name in full})
        if not racks:
            return None
        rack = racks[0]
        return OverCap(rack=rack, cap_watts=self._caps[rack] / MILLI, drawn_watts=self._drawn[rack] / MILLI)

    def _of_share(self, share: NodeShare) -> int:
        return self._draws(share.node, len(share.gpu_ids) * share.gpu_milli / MILLI, share.cpus)

    def _of_need(self, need: Need, name: str) -> int:
        view = self._nodes[name]
        if need.is_exclusive:
            return self._draws(name, float(len(view.gpus)), view.cpus)
        return self._draws(name, need.num_gpus * need.gpu_milli / MILLI, need.millicpus / MILLI)

    def _draws(self, name: str, gpus: float, cpus: float) -> int:
        view = self._nodes[name]
        return _milliwatts(view, "gpu_watts", gpus) + _milliwatts(view, "cpu_watts", cpus)


def _milliwatts(view: NodeView, label: str, count: float) -> int:
    """A label that is no number counts as nothing."""
    try:
        watts = float(view.labels.get(label, "0"))
    except ValueError:
        return 0
    return ceil(watts * count * MILLI) if 0 < watts < inf else 0
