"""What is free on each node: its whole capacity less what is held, updated with each start and end.

Nodes that look alike to every request are grouped, so that later stages ask one question per group instead of
one per node. Readers that cache answers follow two journals: `new_groups`, and `changed_nodes`, the nodes of
which anything changed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from math import inf
from operator import itemgetter
from typing import Generic, TypeVar

from shoal.model.attempt import NodeTask
from shoal.scheduler.facts.amounts import NodeResources, lowest, millicpus_available, millicpus_needed
from shoal.scheduler.facts.gpu_use import GpuUse
from shoal.scheduler.facts.snapshot import Holding, NodeInfo
from shoal.scheduler.placement.packing import Packing, ShapeCounts, free_layout, held_shape

T = TypeVar("T")

MAX_ENTRIES = 4096
"""A reader that is further behind starts over, which costs no more than reading that many entries."""


class Journal(Generic[T]):
    """A log of changes that several readers follow, each at its own pace. It forgets old entries."""

    def __init__(self) -> None:
        self._entries: list[T] = []
        self._first = 0
        self.end = 0
        """The position of a reader that has read everything."""

    def append(self, entry: T) -> None:
        if len(self._entries) >= 2 * MAX_ENTRIES:
            del self._entries[:MAX_ENTRIES]
            self._first += MAX_ENTRIES
        self._entries.append(entry)
        self.end += 1

    def since(self, position: int) -> list[T] | None:
        """Return what was appended after `position`; None if some of that is forgotten."""
        return None if position < self._first else self._entries[position - self._first :]


End = tuple[float, int, NodeTask]
"""When a task is released at the latest (infinity if unknown), its thousandths of CPUs, and the task."""
_when = itemgetter(0)


class NodeUse:
    """A node and what is in use of it."""

    __slots__ = ("devices", "ends", "free", "group", "name", "view", "whole")

    def __init__(self, view: NodeInfo) -> None:
        self.view = view
        self.name = view.name
        self.devices = GpuUse(view.gpus)
        cpus = millicpus_available(view.cpus)
        self.whole = NodeResources(cpus, view.memory_bytes, view.disk_bytes, *self.devices.free)
        self.free = self.whole
        self.group: NodeGroup | None = None
        """Its group among the open nodes."""
        self.ends: list[End] = []
        """What is held here, the first to end first."""

    def label(self, name: str) -> str | None:
        """Return the label's value here. Every node has its pool as the label `pool`."""
        return self.view.labels.get(name) or (self.view.pool if name == "pool" else None)

    def has(self, labels: tuple[tuple[str, str], ...]) -> bool:
        return all(self.label(name) == value for name, value in labels)

    @property
    def is_open(self) -> bool:
        return self.view.closed_because is None

    def take(self, task: NodeTask, ends_at: float) -> None:
        """Give resources to `task`. Free amounts may fall below zero if a node shrank under its holdings."""
        millicpus = millicpus_needed(task.cpus)
        insort(self.ends, (ends_at, millicpus, task), key=_when)
        self._change(task, -millicpus, -1)

    def give(self, task: NodeTask, ends_at: float) -> None:
        """Take the resources of `task` back. It was taken with the same end."""
        index = bisect_left(self.ends, ends_at, key=_when)
        while self.ends[index][2] != task:
            index += 1
        _, millicpus, _ = self.ends.pop(index)
        self._change(task, millicpus, 1)

    def retime(self, task: NodeTask, ends_at: float, to: float) -> None:
        """`task` ends at `to` instead of the time that was given when it was taken."""
        index = bisect_left(self.ends, ends_at, key=_when)
        while self.ends[index][2] != task:
            index += 1
        _, millicpus, _ = self.ends.pop(index)
        insort(self.ends, (to, millicpus, task), key=_when)

    def freed(self, tasks: Iterable[NodeTask]) -> Iterator[NodeResources]:
        """Yield what would be free after each of these tasks was given back, one after the other."""
        free, devices = self.free, self.devices.copy()
        for task in tasks:
            free = _changed(free, devices, task, millicpus_needed(task.cpus), 1)
            yield free

    def _change(self, task: NodeTask, millicpus: int, sign: int) -> None:
        self.free = _changed(self.free, self.devices, task, millicpus, sign)


def _changed(
    free: NodeResources, devices: GpuUse, task: NodeTask, millicpus: int, sign: int
) -> NodeResources:
    """Return `free` with a task given back (1) or taken (-1). Changes `devices` accordingly."""
    if task.gpu_ids:
        devices.use(task, -sign)
    num_gpus, gpus, parts = devices.free
    memory = free.memory_bytes + sign * task.memory_bytes
    disk = free.disk_bytes + sign * task.disk_bytes
    return NodeResources(free.millicpus + millicpus, memory, disk, num_gpus, gpus, parts)


class NodeGroup:
    """Open nodes with the same capacity and the same free amounts, and all with or all without work from
    outside Shoal. `names` is kept sorted.

    A group that lost its last member stays empty: nodes with the same amounts form a new group later.
    """

    __slots__ = ("free", "gpu_millis", "is_busy", "layout", "names", "number", "whole")

    def __init__(self, number: int, whole: NodeResources, free: NodeResources, *, is_busy: bool) -> None:
        self.number = number
        self.whole = whole
        self.free = free
        self.is_busy = is_busy
        self.gpu_millis = free.gpu_millis
        self.layout = free_layout(free)
        self.names: list[str] = []


class Capacity:
    """All nodes by name, and the open ones in groups."""

    def __init__(self, nodes: Iterable[NodeInfo] = (), holdings: Iterable[Holding] = ()) -> None:
        self.nodes: dict[str, NodeUse] = {}
        self.nodes_by_size: dict[NodeResources, dict[str, NodeUse]] = {}
        """Every node, open or closed, by its whole capacity."""
        self.num_open = 0
        self.num_node_changes = 0
        """Grows whenever a node is added, dropped or changed. Cached answers about empty nodes are stale
        then."""
        self.new_groups: Journal[NodeGroup] = Journal()
        self.changed_nodes: Journal[str] = Journal()
        self.shape_counts = ShapeCounts()
        self.packing = Packing()
        self._groups: dict[tuple[NodeResources, NodeResources, bool], NodeGroup] = {}
        self._num_born = 0
        self._most, self._most_as_of = (0, 0, 0), -1
        self._absent: dict[str, list[End]] = {}
        """What is held on nodes that are not listed. These nodes may come back."""
        for view in nodes:
            self.set_node(view)
        for holding in holdings:
            self.hold(holding)

    @property
    def groups(self) -> Iterable[NodeGroup]:
        """The groups that have members."""
        return self._groups.values()

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def set_node(self, view: NodeInfo) -> None:
        """Add a node, or change one. What is held there stays held."""
        ends = self._absent.pop(view.name, []) if view.name not in self.nodes else self._forget(view.name)
        node = self.nodes[view.name] = NodeUse(view)
        for ends_at, _, task in ends:
            node.take(task, ends_at)
        self.nodes_by_size.setdefault(node.whole, {})[view.name] = node
        self.num_open += node.is_open
        self.num_node_changes += 1
        self._join(node)

    def drop_node(self, name: str) -> None:
        """The node is gone. What is held there is remembered until it is released."""
        if name in self.nodes:
            self._absent[name] = self._forget(name)
            self.num_node_changes += 1

    def hold(self, holding: Holding) -> None:
        until = ends_at(holding)
        for task in holding.allocation:
            self.take(task, until)

    def release(self, holding: Holding) -> None:
        until = ends_at(holding)
        for task in holding.allocation:
            self.give(task, until)

    def retime(self, holding: Holding, was: Holding) -> None:
        """The attempt holds what it held before, until another time."""
        for task in holding.allocation:
            node = self.nodes.get(task.node)
            if node is None:
                self.give(task, ends_at(was))
                self.take(task, ends_at(holding))
            else:
                node.retime(task, ends_at(was), ends_at(holding))
                self.changed_nodes.append(node.name)

    def take(self, task: NodeTask, until: float) -> None:
        """Give the task its part of a node."""
        if task.gpu_ids:
            self.shape_counts.count(held_shape(task), 1)
        node = self.nodes.get(task.node)
        if node is None:
            absent = self._absent.setdefault(task.node, [])
            absent.append((until, millicpus_needed(task.cpus), task))
            return
        self._leave(node)
        node.take(task, until)
        self._join(node)

    def give(self, task: NodeTask, until: float) -> None:
        """Take a task back that was taken with the same end."""
        if task.gpu_ids:
            self.shape_counts.count(held_shape(task), -1)
        node = self.nodes.get(task.node)
        if node is None:
            self._absent[task.node].remove((until, millicpus_needed(task.cpus), task))
            return
        self._leave(node)
        node.give(task, until)
        self._join(node)

    def most_free(self) -> tuple[int, int, int]:
        """Return the most thousandths of CPUs, partly or wholly free GPUs, and bytes of memory free on any
        open node.
        """
        if self._most_as_of != self.changed_nodes.end:
            frees = [group.free for group in self._groups.values()]
            cpus = max([free.millicpus for free in frees], default=0)
            gpus = max([free.num_devices for free in frees], default=0)
            self._most = cpus, gpus, max([free.memory_bytes for free in frees], default=0)
            self._most_as_of = self.changed_nodes.end
        return self._most

    def lowest_free(self) -> dict[NodeResources, NodeResources]:
        """Return, for each capacity, the least of each amount that is free on any open node of it."""
        least: dict[NodeResources, NodeResources] = {}
        for group in self.groups:
            least[group.whole] = lowest(least.get(group.whole, group.free), group.free)
        return least

    def _forget(self, name: str) -> list[End]:
        node = self.nodes.pop(name)
        self.num_open -= node.is_open
        self._leave(node)
        self.changed_nodes.append(name)
        same_size = self.nodes_by_size[node.whole]
        del same_size[name]
        if not same_size:
            del self.nodes_by_size[node.whole]
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
        self.changed_nodes.append(node.name)
        if not node.is_open:
            return
        is_busy = node.view.is_busy
        key = node.whole, node.free, is_busy
        group = self._groups.get(key)
        if group is None:
            self._num_born += 1
            group = self._groups[key] = NodeGroup(self._num_born, *key[:2], is_busy=is_busy)
            self.new_groups.append(group)
        insort(group.names, node.name)
        node.group = group


def ends_at(holding: Holding) -> float:
    """Return when it releases what it holds at the latest; infinity if unknown."""
    if holding.time_limit_s is None:
        return inf
    grace_s = holding.request.grace_s if holding.request is not None else 0.0
    return holding.placed_at + holding.time_limit_s + grace_s
