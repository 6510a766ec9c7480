"""Resources as exact integers: what a node has, and what a request needs of each node.

CPUs are counted in thousandths. Needs round up and capacities round down, so that no sum of shares
can pass what a node has, whatever fractions people write.
"""

from __future__ import annotations

from math import ceil, floor
from typing import NamedTuple

from shoal.model.request import Request

MILLI = 1000
NOISE = 1e-6
"""Thousandths of a thousandth: 0.57 * 1000 is 569.9999999999999, and that is float noise, not a wish."""


def millicpus_needed(cpus: float) -> int:
    return ceil(cpus * MILLI - NOISE)


def millicpus_there(cpus: float) -> int:
    return floor(cpus * MILLI + NOISE)


class Amounts(NamedTuple):
    """Of one node: all it has, or what is free. `gpus` counts each kind, sorted by kind."""

    millicpus: int
    memory_bytes: int
    disk_bytes: int
    num_gpus: int
    gpus: tuple[tuple[str, int], ...]

    def gpus_of(self, kind: str | None) -> int:
        """How many of the kind; None counts all."""
        if kind is None:
            return self.num_gpus
        return next((count for name, count in self.gpus if name == kind), 0)


def lowest(first: Amounts, second: Amounts) -> Amounts:
    """The smaller of each amount, of two states of nodes with the same GPUs."""
    kinds = dict(second.gpus)
    return Amounts(
        min(first.millicpus, second.millicpus),
        min(first.memory_bytes, second.memory_bytes),
        min(first.disk_bytes, second.disk_bytes),
        min(first.num_gpus, second.num_gpus),
        tuple((kind, min(count, kinds[kind])) for kind, count in first.gpus if kind in kinds),
    )


class Need(NamedTuple):
    """What one node must give. `memory_bytes` None: in proportion to the larger share of CPUs or GPUs."""

    millicpus: int
    memory_bytes: int | None
    disk_bytes: int
    num_gpus: int
    gpu_kind: str | None

    def memory_on(self, whole: Amounts) -> int:
        """Bytes it takes of a node that has `whole` in all."""
        if self.memory_bytes is not None:
            return self.memory_bytes
        by_cpu = whole.memory_bytes * self.millicpus // whole.millicpus if whole.millicpus > 0 else 0
        by_gpu = whole.memory_bytes * self.num_gpus // whole.num_gpus if whole.num_gpus else 0
        return max(by_cpu, by_gpu)

    def asks_no_more_than(self, other: Need) -> bool:
        """Whether every node that can give `other` can surely give this."""
        if self.memory_bytes is None or other.memory_bytes is None:
            is_memory_less = self.memory_bytes is other.memory_bytes
        else:
            is_memory_less = self.memory_bytes <= other.memory_bytes
        return (
            is_memory_less
            and self.millicpus <= other.millicpus
            and self.num_gpus <= other.num_gpus
            and self.disk_bytes <= other.disk_bytes
            and self.gpu_kind in (None, other.gpu_kind)
        )


def less(free: Amounts, need: Need, whole: Amounts) -> Amounts:
    """What is surely left of `free` on a node that has `whole`, whichever GPUs `need` will take."""
    num_gpus = free.num_gpus - need.num_gpus
    return Amounts(
        free.millicpus - need.millicpus,
        free.memory_bytes - need.memory_on(whole),
        free.disk_bytes - need.disk_bytes,
        num_gpus,
        tuple(
            (kind, min(count - need.num_gpus if kind == need.gpu_kind else count, num_gpus))
            for kind, count in free.gpus
        ),
    )


class Demand(NamedTuple):
    """All that decides whether and where a request fits: equal demands share one answer in a cycle."""

    need: Need
    min_nodes: int
    max_nodes: int
    within: str | None
    is_close_required: bool
    excluded: frozenset[str]


def need_of(request: Request) -> Need:
    gpus = request.gpus
    return Need(
        millicpus=millicpus_needed(request.cpus),
        memory_bytes=request.memory_bytes,
        disk_bytes=request.disk_bytes,
        num_gpus=gpus.count if gpus else 0,
        gpu_kind=gpus.kind if gpus and gpus.count else None,
    )


def demand_of(request: Request, excluded_nodes: tuple[str, ...] = ()) -> Demand:
    topology = request.topology
    return Demand(
        need=need_of(request),
        min_nodes=request.min_nodes,
        max_nodes=request.max_nodes,
        within=topology.within if topology else None,
        is_close_required=topology.is_required if topology else False,
        excluded=frozenset(excluded_nodes),
    )
