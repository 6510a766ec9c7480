"""A node as Slurm tells of it, whichever door told, and what that means to us. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

from shoal.model.node import Gpu, NodeFacts
from shoal.wire import Order

DOWN = frozenset({"DOWN", "FAIL", "FAILING", "FUTURE", "NOT_RESPONDING", "ERROR"})
ASLEEP = frozenset({"POWERED_DOWN", "POWERING_DOWN", "POWERING_UP"})
"""Slurm wakes them for a job: they take work, and tell nothing."""
CLOSED = frozenset({"DRAIN", "DRAINED", "DRAINING", "MAINT", "RESERVED", "PLANNED_MAINT"})
_GRES = re.compile(r"gpu(?::(?P<kind>[A-Za-z0-9_.-]+))?:(?P<count>[0-9]+)")


class RawNode(msgspec.Struct, frozen=True, kw_only=True):
    """In Slurm's words."""

    name: str
    address: str
    states: frozenset[str]
    """`IDLE`, `DRAIN`: each word of its state by itself."""
    reason: str = ""
    features: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    cpus: float = 1.0
    memory_mb: int = 1
    disk_mb: int = 0
    gres: str = ""
    booted_at: float | None = None
    """Wall clock."""


class SlurmNode(msgspec.Struct, frozen=True, kw_only=True):
    facts: NodeFacts
    booted_at: float | None
    """Wall clock."""
    answers: bool
    """Its slurmd does, whether or not the node takes work: one that is drained tells what runs there."""
    gpu_kinds: tuple[str, ...] = ()
    """Of each GPU, by its index, as Slurm spells it; empty where it names none."""


def slurm_nodes(found: Iterable[RawNode], racks: Mapping[str, str], partition: str) -> list[SlurmNode]:
    """Of one partition, where one is named."""
    return [_node(raw, racks, partition) for raw in found if not partition or partition in raw.partitions]


def _node(raw: RawNode, racks: Mapping[str, str], partition: str) -> SlurmNode:
    states = raw.states - {"NOT_RESPONDING"} if raw.states & ASLEEP else raw.states
    closed = sorted(states & (DOWN | CLOSED))
    labels = {f"feature.{feature}": "yes" for feature in raw.features}
    labels |= {f"partition.{part}": "yes" for part in raw.partitions}
    labels |= {"rack": racks[raw.name]} if raw.name in racks else {}
    kinds = _gpu_kinds(raw.gres)
    facts = NodeFacts(
        name=raw.name,
        pool=partition or (raw.partitions[0] if raw.partitions else "default"),
        address=raw.address,
        cpus=raw.cpus,
        memory_bytes=raw.memory_mb << 20,
        disk_bytes=raw.disk_mb << 20,
        gpus=tuple(Gpu(index=index, kind=(kind or "GPU").upper()) for index, kind in enumerate(kinds)),
        is_alive=not closed,
        confinement="unknown",
        labels=labels,
        remarks=(f"Slurm says {' '.join([*closed, raw.reason]).strip()}",) if closed else (),
    )
    return SlurmNode(
        facts=facts, booted_at=raw.booted_at, answers=not states & (DOWN | ASLEEP), gpu_kinds=kinds
    )


def what_changed(order: Order, before: SlurmNode | None, after: SlurmNode | None) -> str | None:
    """What of the order's node is not as it was when somebody chose it, in words; None: nothing we know."""
    if after is None:
        return f"`{order.node}` is not among Slurm's nodes for us any more"
    has, limits = after.facts, order.limits
    if limits.cpus > has.cpus or (limits.memory_bytes or 0) > has.memory_bytes:
        return f"`{order.node}` has {has.cpus:g} CPUs and {has.memory_bytes >> 20} MiB now"
    if len(order.gpu_ids) > len(has.gpus):
        return f"`{order.node}` has {len(has.gpus)} GPUs now"
    if before is not None and _parts(before) != _parts(after):
        return f"`{order.node}` was changed at Slurm a moment ago"
    return None


def _parts(node: SlurmNode) -> tuple[object, ...]:
    """What it has and where it belongs, whether or not it takes work now."""
    facts = node.facts
    return facts.cpus, facts.memory_bytes, facts.pool, facts.labels, node.gpu_kinds


def _gpu_kinds(gres: str) -> tuple[str, ...]:
    found: list[str] = []
    for match in _GRES.finditer(gres):
        found += [match["kind"] or ""] * int(match["count"])
    return tuple(found)
