"""What is free on each node: its whole capacity less what is held, kept up to date as things come and go.

Nodes that look alike to every request are grouped, so that the later stages ask one question a group and
not one a node. Readers that remember answers read two logs: `born`, the groups that came to be, and
`touched`, the nodes of which anything changed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from math import inf
from operator import itemgetter

from shoal.model.attempt import NodeShare
from shoal.scheduler.amounts import Amounts, lowest, millicpus_needed, millicpus_there
from shoal.scheduler.gpu_use import GpuUse
from shoal.scheduler.journal import Journal
from shoal.scheduler.packing import Packing, look_of
from shoal.scheduler.snapshot import Holding, NodeView
from shoal.scheduler.typical import Typical, shape_held

End = tuple[float, int, NodeShare]
"""When a share is given back at the latest (infinity where nobody knows), its thousandths of CPUs, itself."""
_when = itemgetter(0)


class NodeUse:
    """A node and what is used of it."""

    __slots__ = ("devices", "ends", "free", "group", "name", "view", "whole")

    def __init__(self, view: NodeView) -> None:
        self.view = view
        self.name = view.name
        self.devices = GpuUse(view.gpus)
        cpus = millicpus_there(view.cpus)
        self.whole = Amounts(cpus, view.memory_bytes, view.disk_bytes, *self.devices.free)
        self.free = self.whole
        self.group: Group | None = None
        """Where it stands among the open ones."""
        self.ends: list[End] = []
        """What is held here, the first to end first."""

    def label(self, name: str) -> str | None:
        """Its value here; every node has its pool as the label `pool`."""
        return self.view.labels.get(name) or (self.view.pool if name == "pool" else None)

    def has(self, labels: tuple[tuple[str, str], ...]) -> bool:
        return all(self.label(name) == value for name, value in labels)

    @property
    def is_open(self) -> bool:
        return self.view.closed_because is None

    def take(self, share: NodeShare, ends_at: float) -> None:
        """Give `share` away. Free amounts may fall below zero when a node has shrunk under its holdings."""
        millicpus = millicpus_needed(share.cpus)
        insort(self.ends, (ends_at, millicpus, share), key=_when)
        self._change(share, -millicpus, -1)

    def give(self, share: NodeShare, ends_at: float) -> None:
        """Take `share` back; it was taken with the same end."""
        place = bisect_left(self.ends, ends_at, key=_when)
        while self.ends[place][2] != share:
            place += 1
        _, millicpus, _ = self.ends.pop(place)
        self._change(share, millicpus, 1)

    def retime(self, share: NodeShare, ends_at: float, to: float) -> None:
        """`share` ends at another time than was said when it was taken."""
        place = bisect_left(self.ends, ends_at, key=_when)
        while self.ends[place][2] != share:
            place += 1
        _, millicpus, _ = self.ends.pop(place)
        insort(self.ends, (to, millicpus, share), key=_when)

    def freed(self, shares: Iterable[NodeShare]) -> Iterator[Amounts]:
        """What would be free after each of these that are held here were given back, one after the other."""
        free, devices = self.free, self.devices.copy()
        for share in shares:
            free = _changed(free, devices, share, millicpus_needed(share.cpus), 1)
            yield free

    def _change(self, share: NodeShare, millicpus: int, sign: int) -> None:
        self.free = _changed(self.free, self.devices, share, millicpus, sign)


def _changed(free: Amounts, devices: GpuUse, share: NodeShare, millicpus: int, sign: int) -> Amounts:
    """`free` with a share given back (1) or taken (-1); `devices` change with it."""
    if share.gpu_ids:
        devices.use(share, -sign)
    num_gpus, gpus, parts = devices.free
    memory = free.memory_bytes + sign * share.memory_bytes
    disk = free.disk_bytes + sign * share.disk_bytes
    return Amounts(free.millicpus + millicpus, memory, disk, num_gpus, gpus, parts)


class Group:
    """Open nodes with the same capacity and the same free amounts, all busy with others' work or none;
    `names` is kept sorted.

    A group that lost its last member stays empty for ever: nodes that look so again form a new one.
    """

    __slots__ = ("free", "gpu_millis", "is_busy", "look", "names", "number", "whole")

    def __init__(self, number: int, whole: Amounts, free: Amounts, *, is_busy: bool) -> None:
        self.number = number
        self.whole = whole
        self.free = free
        self.is_busy = is_busy
        self.gpu_millis = free.gpu_millis
        self.look = look_of(free)
        self.names: list[str] = []


class Capacity:
    """All nodes by name, and the open ones in groups."""

    def __init__(self, nodes: Iterable[NodeView] = (), holdings: Iterable[Holding] = ()) -> None:
        self.nodes: dict[str, NodeUse] = {}
        self.stock: dict[Amounts, dict[str, NodeUse]] = {}
        """Every node, open or not, by what it has in all."""
        self.num_open = 0
        self.num_node_changes = 0
        """Grows whenever a node comes, goes or changes: what is known of empty nodes is old then."""
        self.born: Journal[Group] = Journal()
        self.touched: Journal[str] = Journal()
        self.typical = Typical()
        self.packing = Packing()
        self._groups: dict[tuple[Amounts, Amounts, bool], Group] = {}
        self._num_born = 0
        self._most, self._most_as_of = (0, 0, 0), -1
        self._absent: dict[str, list[End]] = {}
        """Held on nodes that are not there: they may come back."""
        for view in nodes:
            self.set_node(view)
        for holding in holdings:
            self.hold(holding)

    @property
    def groups(self) -> Iterable[Group]:
        """Those that have members."""
        return self._groups.values()

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def set_node(self, view: NodeView) -> None:
        """A new node, or one that changed. What is held there stays held."""
        ends = self._absent.pop(view.name, []) if view.name not in self.nodes else self._forget(view.name)
        node = self.nodes[view.name] = NodeUse(view)
        for ends_at, _, share in ends:
            node.take(share, ends_at)
        self.stock.setdefault(node.whole, {})[view.name] = node
        self.num_open += node.is_open
        self.num_node_changes += 1
        self._join(node)

    def drop_node(self, name: str) -> None:
        """The node is gone; what is held there is remembered until it is given back."""
        if name in self.nodes:
            self._absent[name] = self._forget(name)
            self.num_node_changes += 1

    def hold(self, holding: Holding) -> None:
        until = ends_at(holding)
        for share in holding.allocation:
            self.take(share, until)

    def release(self, holding: Holding) -> None:
        until = ends_at(holding)
        for share in holding.allocation:
            self.give(share, until)

    def retime(self, holding: Holding, was: Holding) -> None:
        """It holds what it held before, until another time."""
        for share in holding.allocation:
            node = self.nodes.get(share.node)
            if node is None:
                self.give(share, ends_at(was))
                self.take(share, ends_at(holding))
            else:
                node.retime(share, ends_at(was), ends_at(holding))
                self.touched.append(node.name)

    def take(self, share: NodeShare, until: float) -> None:
        """Hand out a share of a node."""
        if share.gpu_ids:
            self.typical.count(shape_held(share), 1)
        node = self.nodes.get(share.node)
        if node is None:
            away = self._absent.setdefault(share.node, [])
            away.append((until, millicpus_needed(share.cpus), share))
            return
        self._leave(node)
        node.take(share, until)
        self._join(node)

    def give(self, share: NodeShare, until: float) -> None:
        """Take a share back that was handed out with the same end."""
        if share.gpu_ids:
            self.typical.count(shape_held(share), -1)
        node = self.nodes.get(share.node)
        if node is None:
            self._absent[share.node].remove((until, millicpus_needed(share.cpus), share))
            return
        self._leave(node)
        node.give(share, until)
        self._join(node)

    def most_free(self) -> tuple[int, int, int]:
        """The most thousandths of CPUs, GPUs of which anything is free, and bytes free on any open node."""
        if self._most_as_of != self.touched.end:
            frees = [group.free for group in self._groups.values()]
            cpus = max([free.millicpus for free in frees], default=0)
            gpus = max([free.num_devices for free in frees], default=0)
            self._most = cpus, gpus, max([free.memory_bytes for free in frees], default=0)
            self._most_as_of = self.touched.end
        return self._most

    def lowest_free(self) -> dict[Amounts, Amounts]:
        """For each capacity, the least of each amount that is free on any open node that has it."""
        least: dict[Amounts, Amounts] = {}
        for group in self.groups:
            least[group.whole] = lowest(least.get(group.whole, group.free), group.free)
        return least

    def _forget(self, name: str) -> list[End]:
        node = self.nodes.pop(name)
        self.num_open -= node.is_open
        self._leave(node)
        self.touched.append(name)
        same = self.stock[node.whole]
        del same[name]
        if not same:
            del self.stock[node.whole]
        return node.ends

    def _leave(self, node: NodeUse) -> None:
        group, node.group = node.group, None
        if group is None:
            return
        if len(group.names) > 1:
            del group.names[bisect_left(group.names, node.name)]
        else:
            group.names.clear()
            del self._groups[group.whole, group.free, group.is_busy]

    def _join(self, node: NodeUse) -> None:
        self.touched.append(node.name)
        if not node.is_open:
            return
        is_busy = node.view.is_busy
        key = node.whole, node.free, is_busy
        group = self._groups.get(key)
        if group is None:
            self._num_born += 1
            group = self._groups[key] = Group(self._num_born, *key[:2], is_busy=is_busy)
            self.born.append(group)
        insort(group.names, node.name)
        node.group = group


def ends_at(holding: Holding) -> float:
    """When it gives back what it holds at the latest; infinity where nobody knows."""
    if holding.time_limit_s is None:
        return inf
    grace_s = holding.request.grace_s if holding.request is not None else 0.0
    return holding.placed_at + holding.time_limit_s + grace_s
