"""What a job asks of the cluster, parsed once from its spec and compared many times by the scheduler."""

from __future__ import annotations

import msgspec


class GpuRequest(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs per node. `kind` None takes any whole device, and never a MIG slice."""

    count: int
    kind: str | None = None
    milli: int = 1000
    """Thousandths of its one GPU; 1000 whenever there are several."""

    @property
    def amount(self) -> float:
        """As it is written: how many, or the part of one."""
        return self.count * self.milli / 1000


def can_be_looser(within: str | None) -> bool:
    """Whether a gang might be told to do without: pools may be parts that an engine does not mix."""
    return within is not None and within != "pool"


class TopologyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """All nodes inside one domain of the level `within`; preferred closeness never delays a start.

    `spread`: no two nodes in the same domain of that level.
    """

    within: str | None = None
    is_required: bool = True
    spread: str | None = None

    @property
    def can_be_looser(self) -> bool:
        return self.is_required and can_be_looser(self.within)


class Request(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """Per node unless it says otherwise. No memory asked: in proportion to the share of CPUs or GPUs."""

    min_nodes: int = 1
    max_nodes: int = 1
    cpus: float = 1.0
    memory_bytes: int | None = None
    disk_bytes: int = 0
    gpus: GpuRequest | None = None
    ranks_per_node: int = 1
    is_exclusive: bool = False
    """Takes all that each of its nodes has, and shares them with nobody."""
    exclude: tuple[str, ...] = ()
    """Names of nodes it must not run on."""
    require: tuple[tuple[str, str], ...] = ()
    """Labels that each of its nodes must have, sorted."""
    topology: TopologyRequest | None = None
    time_limit_s: float | None = None
    grace_s: float = 0.0
    """From the signal at its time limit to the kill."""

    @property
    def longest_s(self) -> float | None:
        """After so long it holds nothing any more; None: nobody knows."""
        return None if self.time_limit_s is None else self.time_limit_s + self.grace_s
