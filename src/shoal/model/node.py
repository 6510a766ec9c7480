"""Nodes: what an engine found on them, and what people decided about them."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One device. `index` is the driver's own numbering, by which people and the scheduler name it.

    Neither the device file nor CUDA need count alike: the first goes by `minor`, the second by `uuid`.
    """

    index: int
    kind: str
    uuid: str = ""
    minor: int | None = None
    """N of /dev/nvidiaN; None where the driver has no such file, or does not say."""
    memory_bytes: int = 0


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine reports; replaced whole at every report, never edited by us."""

    name: str
    pool: str = "default"
    address: str = "127.0.0.1"
    cpus: float
    memory_bytes: int
    disk_bytes: int
    gpus: tuple[Gpu, ...] = ()
    is_simulated: bool = False
    is_alive: bool = True
    confinement: str = ""
    """Which walls stand around a job here, e.g. `cgroup1 bubblewrap uid`; `unknown` until somebody knows."""
    labels: dict[str, str] = {}
    """Topology levels among them: `zone`, `fabric`, `rack`, `nvlink`."""
    remarks: tuple[str, ...] = ()
    """What one might expect there and the engine did not find, and why."""


class NodeState(StrEnum):
    """What people, or health checks, decided about a node."""

    READY = "ready"
    """Takes work."""
    CORDONED = "cordoned"
    """Takes no new work; what runs there runs on."""
    DRAINING = "draining"
    """Takes no new work; what runs there is asked to stop and queued again."""
    DRAINED = "drained"
    """Takes no new work, and nothing holds any part of it: the drain is over."""
    DEAD = "dead"
    """An operator declared that nothing runs there any more: evidence for replacing its attempts."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node as the control plane knows it."""

    facts: NodeFacts
    engine: str
    state: NodeState = NodeState.READY
    because: str = ""
    by: str = ""
    changed_at: float = 0.0
    version: int = 1

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def takes_work(self) -> bool:
        return self.state is NodeState.READY and self.facts.is_alive
