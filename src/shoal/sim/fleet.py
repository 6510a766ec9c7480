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
    """Of a cluster's own nodes those that `shape` describes, or all where they are alike. `SpecError`: which?

    Nodes of other kinds stay as they are, whatever closes them today is over, and racks are not planned.
    """
    whole = [msgspec.structs.replace(node, closed_because=None, labels={}) for node in nodes]
    kinds = Counter(_shape(node) for node in whole)
    names = ", ".join(str(kind.of(count)) for kind, count in kinds.most_common())
    if shape is None and len(kinds) > 1:
        first, count = kinds.most_common(1)[0]
        raise SpecError(
            f"this cluster has nodes of {len(kinds)} kinds: {names}; which are to be counted?",
            hint=f"--nodes {first.of(count)}",
        )
    chosen = [node for node in whole if shape is None or looks_like(node, shape)]
    if not chosen:
        raise SpecError(f"`--nodes {shape}`: this cluster has none of those; there are {names or 'none'}")
    others = tuple(node for node in whole if node not in chosen)
    return Fleet(_shape(chosen[0]).of(len(chosen)), chosen[0], others)


def _shape(node: NodeView) -> Shape:
    return Shape(1, len(node.gpus), node.gpus[0].kind) if node.gpus else Shape(1)
