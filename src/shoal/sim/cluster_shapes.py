"""Clusters in a few characters: `8xH100:8` is eight nodes with eight H100, `240` is 240 processors.

`PlannedFleet` is the part of a cluster whose size a plan chooses: equal nodes, beside others that stay as
they are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from shoal.errors import SpecError
from shoal.scheduler.facts.snapshot import GpuInfo, NodeInfo
from shoal.sim.workload import CountedDevice, devices_of_node

SHAPE = re.compile(r"(?P<count>[1-9]\d*)(?:x(?:(?P<kind>[A-Za-z][\w.-]*):)?(?P<gpus>[1-9]\d*))?")
ANY_KIND = "gpu"
CPUS_PER_GPU = 16
"""CPUs of a node that is only described by its GPUs. Jobs without a number of CPUs take one per GPU."""
POOL = "pool"
"""The name of the one node that stands for processors that are all alike."""


class ClusterShape(msgspec.Struct, frozen=True):
    """`count` nodes, each with the same GPUs of a kind. Without GPUs, `count` processors in one pool."""

    count: int
    gpus: int = 0
    kind: str = ANY_KIND

    def __str__(self) -> str:
        if not self.gpus:
            return str(self.count)
        return f"{self.count}x{'' if self.kind == ANY_KIND else f'{self.kind}:'}{self.gpus}"

    def of(self, count: int) -> ClusterShape:
        return msgspec.structs.replace(self, count=count)

    @property
    def devices(self) -> int:
        return self.count * (self.gpus or 1)


def parse_shape(text: str, option: str) -> ClusterShape:
    match = SHAPE.fullmatch(text.strip())
    if match is None:
        raise SpecError(
            f"`{option} {text}`: a cluster is NODESxKIND:GPUS, NODESxGPUS, or a count of processors",
            hint=f"{option} 8xH100:8",
        )
    return ClusterShape(int(match["count"]), int(match["gpus"] or 0), match["kind"] or ANY_KIND)


def nodes_of(shape: ClusterShape, *, prefix: str = "node", first: int = 1) -> tuple[NodeInfo, ...]:
    """The nodes, named from `first` on. Names sort in the order of their numbers."""
    if not shape.gpus:
        return (NodeInfo(name=POOL, cpus=shape.count, memory_bytes=0),)
    gpus = tuple(GpuInfo(index, shape.kind) for index in range(shape.gpus))
    return tuple(
        NodeInfo(name=f"{prefix}-{number:05d}", cpus=CPUS_PER_GPU * shape.gpus, memory_bytes=0, gpus=gpus)
        for number in range(first, first + shape.count)
    )


def looks_like(node: NodeInfo, shape: ClusterShape) -> bool:
    """Whether the node has as many GPUs as the shape's nodes, of the same kind, or of any kind if none is
    named.
    """
    return len(node.gpus) == shape.gpus and all(shape.kind in (ANY_KIND, gpu.kind) for gpu in node.gpus)


def is_pool(nodes: Sequence[NodeInfo]) -> bool:
    return len(nodes) == 1 and nodes[0].name == POOL


class PlannedFleet(msgspec.Struct, frozen=True):
    shape: ClusterShape
    """Without GPUs and without a model: processors in one pool."""
    model: NodeInfo | None = None
    """Each node is like this one. None: as the shape says."""
    others: tuple[NodeInfo, ...] = ()

    @property
    def count(self) -> int:
        return self.shape.count

    @property
    def is_pool(self) -> bool:
        return self.model is None and not self.shape.gpus

    @property
    def unit(self) -> str:
        return "processors" if self.is_pool else "nodes"

    @property
    def devices(self) -> int:
        """Devices of all nodes, including the others."""
        device = CountedDevice.GPU if self.shape.gpus else CountedDevice.CPU
        return round(self.count * self.each + sum(devices_of_node(node, device) for node in self.others))

    @property
    def each(self) -> float:
        """Devices of one node."""
        if self.model is None or self.shape.gpus:
            return self.shape.gpus or 1
        return self.model.cpus

    def of(self, count: int) -> PlannedFleet:
        return msgspec.structs.replace(self, shape=self.shape.of(count))

    def nodes(self) -> tuple[NodeInfo, ...]:
        if self.model is None:
            return nodes_of(self.shape)
        taken = {node.name for node in self.others}
        names = (f"planned-{number:05d}" for number in range(1, self.count + len(taken) + 1))
        free = [name for name in names if name not in taken][: self.count]
        return (*self.others, *(msgspec.structs.replace(self.model, name=name) for name in free))

    def __str__(self) -> str:
        if self.model is None or self.shape.gpus:
            return str(self.shape)
        return f"{self.count} nodes of {self.model.cpus:g} CPUs"


def fleet_of(nodes: Iterable[NodeInfo], shape: ClusterShape | None) -> PlannedFleet:
    """The nodes of a cluster that `shape` describes. None: those with GPUs, or all nodes if none has GPUs.

    The other nodes stay as they are. Closed nodes count as open, and racks are not planned. `SpecError`:
    there are no such nodes, or they are of several kinds.
    """
    whole = [msgspec.structs.replace(node, closed_because=None, labels={}) for node in nodes]
    kinds = Counter(_shape(node) for node in whole if node.gpus)
    names = ", ".join(str(kind.of(count)) for kind, count in kinds.most_common())
    if shape is None and len(kinds) > 1:
        raise SpecError(
            f"this cluster has nodes of {len(kinds)} kinds: {names}; choose the ones to count",
            hint=f"--nodes {names.partition(',')[0]}",
        )
    wanted = shape or next(iter(kinds), ClusterShape(1))
    chosen = [node for node in whole if looks_like(node, wanted)]
    if not chosen:
        raise SpecError(
            f"`--nodes {shape}`: this cluster has none of those; with GPUs there are {names or 0}",
            hint=f"--nodes {names.partition(',')[0]}" if names else "leave `--nodes` out: all are counted",
        )
    others = tuple(node for node in whole if node not in chosen)
    size = Counter((node.cpus, node.memory_bytes) for node in chosen).most_common(1)[0][0]
    model = next(node for node in chosen if (node.cpus, node.memory_bytes) == size)
    return PlannedFleet(_shape(model).of(len(chosen)), model, others)


def _shape(node: NodeInfo) -> ClusterShape:
    return ClusterShape(1, len(node.gpus), node.gpus[0].kind) if node.gpus else ClusterShape(1)
