"""Clusters in a few characters: `8xH100:8` is eight nodes with eight H100, `240` is 240 processors."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from shoal.errors import SpecError
from shoal.scheduler.snapshot import GpuView, NodeView

SHAPE = re.compile(r"(?P<count>[1-9]\d*)(?:x(?:(?P<kind>[A-Za-z][\w.-]*):)?(?P<gpus>[1-9]\d*))?")
ANY_KIND = "gpu"
CPUS_PER_GPU = 16
"""Of a node that is only described by its GPUs. Jobs that say nothing about CPUs take one a GPU."""
POOL = "pool"
"""The name of the one node that stands for processors that are all alike."""


class Shape(msgspec.Struct, frozen=True):
    """So many nodes, each with so many GPUs of a kind; without GPUs, so many processors in one pool."""

    count: int
    gpus: int = 0
    kind: str = ANY_KIND

    def __str__(self) -> str:
        if not self.gpus:
            return str(self.count)
        return f"{self.count}x{'' if self.kind == ANY_KIND else f'{self.kind}:'}{self.gpus}"

    def of(self, count: int) -> Shape:
        return msgspec.structs.replace(self, count=count)

    @property
    def devices(self) -> int:
        return self.count * (self.gpus or 1)


def parse_shape(text: str, option: str) -> Shape:
    found = SHAPE.fullmatch(text.strip())
    if found is None:
        raise SpecError(
            f"`{option} {text}`: a cluster is NODESxKIND:GPUS, NODESxGPUS, or a count of processors",
            hint=f"{option} 8xH100:8",
        )
    return Shape(int(found["count"]), int(found["gpus"] or 0), found["kind"] or ANY_KIND)


def nodes_of(shape: Shape, *, prefix: str = "node", first: int = 1) -> tuple[NodeView, ...]:
    """The nodes, named from `first` on; names sort as they count."""
    if not shape.gpus:
        return (NodeView(name=POOL, cpus=shape.count, memory_bytes=0),)
    gpus = tuple(GpuView(index, shape.kind) for index in range(shape.gpus))
    return tuple(
        NodeView(name=f"{prefix}-{number:05d}", cpus=CPUS_PER_GPU * shape.gpus, memory_bytes=0, gpus=gpus)
        for number in range(first, first + shape.count)
    )


def looks_like(node: NodeView, shape: Shape) -> bool:
    """Whether it has as many GPUs as the nodes of the shape, of the same kind or of any if none is named."""
    return len(node.gpus) == shape.gpus and all(shape.kind in (ANY_KIND, gpu.kind) for gpu in node.gpus)


def is_pool(nodes: Sequence[NodeView]) -> bool:
    return len(nodes) == 1 and nodes[0].name == POOL
