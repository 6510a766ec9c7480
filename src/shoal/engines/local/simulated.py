"""Simulated nodes: names, racks and fake GPUs whose ranks are real processes of this machine."""

from __future__ import annotations

import re

import msgspec

from shoal.errors import SpecError
from shoal.model.node import Gpu, NodeFacts

GIB = 1 << 30
NODES_PER_RACK = 4
RACKS_PER_ZONE = 4
MAX_NODES = 10_000
MAX_GPUS = 64
SHAPE = re.compile(r"(?P<nodes>\d{1,6})x(?P<gpus>\d{1,4})(?:x(?P<kind>[A-Za-z][A-Za-z0-9-]{0,31}))?")


class SimulatedNodes(msgspec.Struct, frozen=True, kw_only=True):
    """`count` nodes alike; what is promised is simulated, what runs is not."""

    count: int
    gpus_per_node: int = 8
    gpu_kind: str = "fake"
    cpus_per_node: float = 8.0
    memory_bytes: int = 64 * GIB
    disk_bytes: int = 100 * GIB
    gpu_memory_bytes: int = 80 * GIB

    @classmethod
    def parse(cls, text: str) -> SimulatedNodes:
        """`16x8`: sixteen nodes of eight GPUs; `16x8xH100`: and call the GPUs H100."""
        shape = SHAPE.fullmatch(text.strip())
        if shape is None:
            raise SpecError(
                f"simulated nodes {text!r} are not written NODESxGPUS or NODESxGPUSxKIND",
                hint="shoal up --demo 16x8",
            )
        count, gpus = int(shape["nodes"]), int(shape["gpus"])
        if not 1 <= count <= MAX_NODES or gpus > MAX_GPUS:
            raise SpecError(
                f"{count} simulated nodes of {gpus} GPUs; possible are 1 to {MAX_NODES} of 0 to {MAX_GPUS}",
                hint="shoal up --demo 16x8",
            )
        return cls(count=count, gpus_per_node=gpus, gpu_kind=shape["kind"] or "fake")

    def facts(self, confinement: str = "") -> list[NodeFacts]:
        """`sim-01` and so on, four to a rack and four racks to a zone."""
        width = max(2, len(str(self.count)))
        return [self._node(index, f"sim-{index + 1:0{width}d}", confinement) for index in range(self.count)]

    def _node(self, index: int, name: str, confinement: str) -> NodeFacts:
        rack = index // NODES_PER_RACK
        gpus = tuple(
            Gpu(index=i, kind=self.gpu_kind, uuid=f"fake-{name}-{i}", memory_bytes=self.gpu_memory_bytes)
            for i in range(self.gpus_per_node)
        )
        return NodeFacts(
            name=name,
            pool="sim",
            cpus=self.cpus_per_node,
            memory_bytes=self.memory_bytes,
            disk_bytes=self.disk_bytes,
            gpus=gpus,
            is_simulated=True,
            confinement=confinement,
            labels={"zone": f"zone-{rack // RACKS_PER_ZONE + 1}", "rack": f"rack-{rack + 1:02d}"},
        )
