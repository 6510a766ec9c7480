"""Resources as exact integers: what a node has, and what a request needs of each node.

CPUs, and GPUs that are shared, are counted in thousandths. Needs round up and capacities round down, so no
sum of tasks can exceed what a node has, whatever fractions people write.

`DeviceAmount` counts what a project holds or asks for over all nodes, in thousandths of devices.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, floor
from typing import NamedTuple

import msgspec

from shoal.model.attempt import Allocation
from shoal.model.job import ResourceRequest, can_be_looser
from shoal.model.node import is_slice, kinds_of
from shoal.model.people import DeviceAmounts

MILLI = 1000
NOISE = 1e-6
"""In thousandths. 0.57 * 1000 is 569.9999999999999: the difference is float noise, not a request for a little
less."""


@lru_cache(maxsize=1 << 12)
def millicpus_needed(cpus: float) -> int:
    return ceil(cpus * MILLI - NOISE)


def millicpus_available(cpus: float) -> int:
    return floor(cpus * MILLI + NOISE)


class NodeResources(NamedTuple):
    """All that one node has, or what is free of it.

    `num_gpus` counts unused GPUs without MIG slices. `gpus` counts unused devices of each kind, slices
    included, sorted by kind.
    """

    millicpus: int
    memory_bytes: int
    disk_bytes: int
    num_gpus: int
    gpus: tuple[tuple[str, int], ...]
    parts: tuple[tuple[str, int], ...] = ()
    """For each GPU that is shared: its kind and the thousandths that are free; sorted."""

    @property
    def gpu_millis(self) -> int:
        """Thousandths of GPUs, without slices."""
        whole = self.num_gpus * MILLI
        return whole + sum([left for _, left in self.parts]) if self.parts else whole

    @property
    def num_devices(self) -> int:
        """Devices of any kind, including slices and shared ones."""
        return sum([count for _, count in self.gpus]) + len(self.parts) if self.gpus else len(self.parts)

    def gpus_of(self, kind: str | None) -> int:
        """Count the devices of the kind; None counts all but slices."""
        if kind is None:
            return self.num_gpus
        kinds = kinds_of(kind)
        return sum(count for name, count in self.gpus if name in kinds)

    def has_part(self, milli: int, kind: str | None) -> bool:
        """Whether a shared GPU of the kind has `milli` thousandths left."""
        return any(left >= milli and (kind is None or name in kinds_of(kind)) for name, left in self.parts)


def lowest(first: NodeResources, second: NodeResources) -> NodeResources:
    """Return the smaller of each amount, for two states of nodes with the same GPUs."""
    kinds = dict(second.gpus)
    return NodeResources(
        min(first.millicpus, second.millicpus),
        min(first.memory_bytes, second.memory_bytes),
        min(first.disk_bytes, second.disk_bytes),
        min(first.num_gpus, second.num_gpus),
        tuple((kind, min(count, kinds[kind])) for kind, count in first.gpus if kind in kinds),
        first.parts if first.parts == second.parts else (),
    )


class Need(NamedTuple):
    """What one node must give. `memory_bytes` None: in proportion to the larger share of CPUs or GPUs.

    `gpu_milli` below 1000: that much of a single GPU, which other jobs may share. `is_exclusive`: the whole
    node, which must have at least the other amounts; no other job may hold any of it. `labels`: the labels it
    must have.
    """

    millicpus: int
    memory_bytes: int | None
    disk_bytes: int
    num_gpus: int
    gpu_kind: str | None
    gpu_milli: int = MILLI
    is_exclusive: bool = False
    labels: tuple[tuple[str, str], ...] = ()

    def memory_on(self, whole: NodeResources) -> int:
        """Bytes it takes of a node that has `whole` in all."""
        if self.memory_bytes is not None:
            return self.memory_bytes
        by_cpu = whole.memory_bytes * self.millicpus // whole.millicpus if whole.millicpus > 0 else 0
        if not self.num_gpus:
            return by_cpu
        has_slices = self.gpu_kind is not None and is_slice(self.gpu_kind)
        devices = sum(count for _, count in whole.gpus) if has_slices else whole.num_gpus
        by_gpu = whole.memory_bytes * self.num_gpus * self.gpu_milli // (devices * MILLI) if devices else 0
        return max(by_cpu, by_gpu)

    def charged_on(self, whole: NodeResources) -> int:
        """Thousandths of CPUs that its memory keeps from other jobs on that node, if these are more than it
        asks for.

        Memory in proportion to CPUs or GPUs is charged with them.
        """
        if self.memory_bytes is None or self.num_gpus or whole.memory_bytes <= 0:
            return 0
        charged = self.memory_bytes * whole.millicpus // whole.memory_bytes
        return charged if charged > self.millicpus else 0


def remaining_after(free: NodeResources, need: Need, whole: NodeResources) -> NodeResources:
    """Return what is certainly left of `free` on a node that has `whole`, whichever GPUs `need` will take."""
    if need.is_exclusive:
        return NodeResources(0, 0, 0, 0, ())
    if not need.num_gpus and not free.gpus and not free.parts:
        millicpus, memory, disk = free[:3]
        memory -= need.memory_on(whole)
        return NodeResources(millicpus - need.millicpus, memory, disk - need.disk_bytes, free.num_gpus, ())
    kinds = kinds_of(need.gpu_kind) if need.gpu_kind is not None else frozenset()
    num_gpus = free.num_gpus - (0 if any(map(is_slice, kinds)) else need.num_gpus)
    return NodeResources(
        free.millicpus - need.millicpus,
        free.memory_bytes - need.memory_on(whole),
        free.disk_bytes - need.disk_bytes,
        num_gpus,
        tuple(
            (kind, left if is_slice(kind) else min(left, num_gpus))
            for kind, count in free.gpus
            for left in [count - need.num_gpus if kind in kinds else count]
        ),
        free.parts if need.gpu_milli == MILLI else (),
    )


class Demand(NamedTuple):
    """All that decides whether and where a request fits. Equal demands share one answer in a cycle."""

    need: Need
    min_nodes: int
    max_nodes: int
    within: str | None
    is_close_required: bool
    excluded: frozenset[str]
    spread: str | None = None
    """A topology level: no two of the nodes may be in the same domain of it."""
    avoided: frozenset[str] = frozenset()
    """Nodes that are used only if the job could not start without them."""

    @property
    def can_be_looser(self) -> bool:
        return self.is_close_required and can_be_looser(self.within)


def need_of(request: ResourceRequest) -> Need:
    gpus = request.gpus
    return Need(
        millicpus=millicpus_needed(request.cpus),
        memory_bytes=request.memory_bytes,
        disk_bytes=request.disk_bytes,
        num_gpus=gpus.count if gpus else 0,
        gpu_kind=gpus.kind if gpus and gpus.count else None,
        gpu_milli=gpus.milli if gpus else MILLI,
        is_exclusive=request.is_exclusive,
        labels=request.require,
    )


@lru_cache(maxsize=1 << 13)
def demand_of(
    request: ResourceRequest, excluded_nodes: tuple[str, ...] = (), avoided_nodes: tuple[str, ...] = ()
) -> Demand:
    topology = request.topology
    return Demand(
        need=need_of(request),
        min_nodes=request.min_nodes,
        max_nodes=request.max_nodes,
        within=topology.within if topology else None,
        is_close_required=topology.is_required if topology else False,
        excluded=frozenset(excluded_nodes).union(request.exclude),
        spread=topology.spread if topology else None,
        avoided=frozenset(avoided_nodes),
    )


class DeviceAmount(NamedTuple):
    """Over all nodes together. A MIG slice counts as one GPU."""

    milligpus: int
    millicpus: int


class ProjectInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A project as the scheduler sees it. The fields mean what they mean in `model.people.Project`."""

    name: str
    parent: str | None = None
    quota: DeviceAmounts | None = None
    limit: DeviceAmounts | None = None
    borrow: DeviceAmounts | None = None
    weight: float = 1.0


def minimum_devices(demand: Demand) -> DeviceAmount:
    """Return the least it can start with. Whole nodes may have more than that: see `whole_node_devices`."""
    need = demand.need
    return DeviceAmount(need.num_gpus * need.gpu_milli * demand.min_nodes, need.millicpus * demand.min_nodes)


def whole_node_devices(whole: NodeResources, num_nodes: int) -> DeviceAmount:
    """Return the devices of `num_nodes` whole nodes that have `whole` each."""
    return DeviceAmount(whole.num_devices * MILLI * num_nodes, whole.millicpus * num_nodes)


def held_devices(allocation: Allocation) -> DeviceAmount:
    milligpus = millicpus = 0
    for task in allocation:
        milligpus += len(task.gpu_ids) * task.gpu_milli
        millicpus += max(millicpus_needed(task.cpus), task.charged_millicpus)
    return DeviceAmount(milligpus, millicpus)
