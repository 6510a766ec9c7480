"""The part of a cluster that a plan chooses the size of: nodes alike, beside others that stay as they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from shoal.errors import SpecError
from shoal.scheduler.snapshot import NodeView
from shoal.sim.machines import Shape, looks_like, nodes_of
from shoal.sim.workload import Device, devices_of_node


class Fleet(msgspec.Struct, frozen=True):
    shape: Shape
    """Without GPUs and without a model: processors in one pool."""
    model: NodeView | None = None
    """Each is like this one; None: as the shape says."""
    others: tuple[NodeView, ...] = ()

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
        """Of all nodes, the others among them."""
        device = Device.GPU if self.shape.gpus else Device.CPU
        return round(self.count * self.each + sum(devices_of_node(node, device) for node in self.others))

    @property
    def each(self) -> float:
        """Devices of one node."""
        if self.model is None or self.shape.gpus:
            return self.shape.gpus or 1
        return self.model.cpus

    def of(self, count: int) -> Fleet:
        return msgspec.structs.replace(self, shape=self.shape.of(count))

    def nodes(self) -> tuple[NodeView, ...]:
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


def fleet_of(nodes: Iterable[NodeView], shape: Shape | None) -> Fleet:
    """Of a cluster's own nodes those that `shape` describes; None: those with GPUs, or all if there are none.

    The others stay as they are, whatever closes nodes today is over, and racks are not planned. `SpecError`:
    there are no such nodes, or they are of several kinds.
    """
    whole = [msgspec.structs.replace(node, closed_because=None, labels={}) for node in nodes]
    kinds = Counter(_shape(node) for node in whole if node.gpus)
    names = ", ".join(str(kind.of(count)) for kind, count in kinds.most_common())
    if shape is None and len(kinds) > 1:
        raise SpecError(
            f"this cluster has nodes of {len(kinds)} kinds: {names}; which are to be counted?",
            hint=f"--nodes {names.partition(',')[0]}",
        )
    wanted = shape or next(iter(kinds), Shape(1))
    chosen = [node for node in whole if looks_like(node, wanted)]
    if not chosen:
        raise SpecError(
            f"`--nodes {shape}`: this cluster has none of those; with GPUs there are {names or 0}",
            hint=f"--nodes {names.partition(',')[0]}" if names else "leave `--nodes` out: all are counted",
        )
    others = tuple(node for node in whole if node not in chosen)
    size = Counter((node.cpus, node.memory_bytes) for node in chosen).most_common(1)[0][0]
    model = next(node for node in chosen if (node.cpus, node.memory_bytes) == size)
    return Fleet(_shape(model).of(len(chosen)), model, others)


def _shape(node: NodeView) -> Shape:
    return Shape(1, len(node.gpus), node.gpus[0].kind) if node.gpus else Shape(1)
