"""A node as Slurm tells of it, whichever door told, and what that means to us. Pure.

Its pool is the partition that jobs on it go to first; every other that they may go to is a label.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

import msgspec

from shoal.engines.boots import JITTER_S, Boot
from shoal.engines.slurm.partitions import LABEL, Partition, Parts
from shoal.model.node import Gpu, NodeFacts
from shoal.wire import Order

DOWN = frozenset({"DOWN", "FAIL", "FAILING", "FUTURE", "NOT_RESPONDING", "ERROR"})
ASLEEP = frozenset({"POWERED_DOWN", "POWERING_DOWN", "POWERING_UP"})
"""Slurm wakes them for a job: they take work, and tell nothing."""
CLOSED = frozenset({"DRAIN", "DRAINED", "DRAINING", "MAINTENANCE", "RESERVED"})
"""As `scontrol` and slurmrestd say it; `sinfo` has shorter words."""
TAKEN = frozenset({"ALLOCATED", "MIXED"})
_GPUS = re.compile(r"gpu(?::(?P<kind>[A-Za-z0-9_.-]+))?:(?P<count>[0-9]+)")
_OTHERS = re.compile(r"(?:^|,)(?!gpu\b)([A-Za-z][A-Za-z0-9_.-]*)(?=[:,(]|$)")
DRAINED = frozenset({"DRAIN", "DRAINED", "DRAINING"})
IN_WORDS = {"MAINTENANCE": "in maintenance", "RESERVED": "reserved"}
UNKILLED = "kill task failed"
"""In the reason for which slurmd drains a node: it has given a job up whose processes do not die. One that is
drained already keeps the reason it has: then nobody says so."""
GRES = "gres."
"""What the label begins with that says what else than GPUs Slurm counts there."""
Places = Mapping[str, Mapping[str, str]]
"""By node: the switches above it, as labels."""


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
    """That jobs may have: without what is set aside for the system (MemSpecLimit)."""
    disk_mb: int = 0
    gres: str = ""
    booted_at: float | None = None
    """Wall clock."""
    slurmd_at: float | None = None
    """When its slurmd was started. Wall clock, as that was then."""


class SlurmNode(msgspec.Struct, frozen=True, kw_only=True):
    facts: NodeFacts
    boot: Boot | None
    """None: nobody tells it now. By its address, as Slurm knows nothing else to tell machines apart by."""
    answers: bool
    """Its slurmd does, whether or not the node takes work: one that is drained tells what runs there."""
    gpu_kinds: tuple[str, ...] = ()
    """Of each GPU, by its index, as Slurm spells it; empty where it names none."""
    partitions: tuple[str, ...] = ()
    """All that it is in."""
    is_drained: bool = False
    shut: str = ""
    """Why it begins nothing until somebody does something about it, in Slurm's words. Empty: it does, or has
    been silent for a moment."""
    mute: str = ""
    """That its slurmd does not answer, in Slurm's words, which calls it down after SlurmdTimeout. Empty:
    it does, or the node sleeps."""
    is_asleep: bool = False
    """Or about to wake, maybe at another address."""
    is_taken: bool = False
    """All of it or a part is given to jobs, whosever they are."""
    unkilled: str = ""
    """That processes of a job which Slurm calls over did not die there, in Slurm's words. Whose, it does not
    say. Empty: it knows of none."""

    @property
    def tells(self) -> bool:
        """Whether Slurm would say of it what does not die there, and does not."""
        return self.answers and not self.is_drained and not self.unkilled


def slurm_nodes(found: Iterable[RawNode], places: Places, parts: Parts) -> list[SlurmNode]:
    """Those in partitions that jobs may go to."""
    usable = ((raw, parts.of(raw.partitions)) for raw in found)
    return [_node(raw, places.get(raw.name, {}), through) for raw, through in usable if through]


def by_name(found: Iterable[SlurmNode], before: Mapping[str, SlurmNode]) -> dict[str, SlurmNode]:
    """With what was known `before`: that something did not die there is so until somebody has resumed the
    node, whatever else its reason says meanwhile.
    """
    nodes = {node.facts.name: node for node in found}
    for name, node in nodes.items():
        if name in before and not node.unkilled and not node.tells:
            nodes[name] = msgspec.structs.replace(node, unkilled=before[name].unkilled)
    return nodes


def _node(raw: RawNode, places: Mapping[str, str], through: list[Partition]) -> SlurmNode:
    states = raw.states - {"NOT_RESPONDING"} if raw.states & ASLEEP else raw.states
    closed = sorted(states & (DOWN | CLOSED))
    said = f"Slurm says {' '.join([*closed, raw.reason]).strip()}"
    remarks = [said] if closed else []
    if not any(one.is_up for one in through):
        remarks += [f"Slurm says partition `{one.name}` is {one.state}" for one in through]
    labels = {f"feature.{feature}": "yes" for feature in raw.features}
    labels |= {f"{LABEL}{one.name}": "yes" for one in through}
    labels |= {f"{GRES}{name}": "yes" for name in _OTHERS.findall(raw.gres)}
    labels |= places
    kinds, answers = _gpu_kinds(raw.gres), not states & (DOWN | ASLEEP)
    facts = NodeFacts(
        name=raw.name,
        pool=through[0].name,
        address=raw.address,
        cpus=raw.cpus,
        memory_bytes=raw.memory_mb << 20,
        disk_bytes=raw.disk_mb << 20,
        gpus=tuple(Gpu(index=index, kind=(kind or "GPU").upper()) for index, kind in enumerate(kinds)),
        is_alive=not remarks,
        closed="" if states & DOWN else _why_closed(raw, states & CLOSED, through),
        confinement="unknown",
        labels=labels,
        remarks=tuple(remarks),
    )
    return SlurmNode(
        facts=facts,
        boot=_boot(raw) if answers else None,
        answers=answers,
        gpu_kinds=kinds,
        partitions=raw.partitions,
        unkilled=f"Slurm says of `{raw.name}`: {raw.reason}" if UNKILLED in raw.reason.lower() else "",
        is_drained=bool(states & DRAINED),
        shut=said if closed not in ([], ["NOT_RESPONDING"]) else "",
        mute=said if "NOT_RESPONDING" in closed else "",
        is_asleep=bool(states & ASLEEP),
        is_taken=bool(states & TAKEN),
    )


def _why_closed(raw: RawNode, closed: frozenset[str], through: list[Partition]) -> str:
    """In words; empty: it is not. Slurm speaks to it, or would wake it, and gives it nothing."""
    if closed:
        said = sorted({"drained" if state in DRAINED else IN_WORDS[state] for state in closed})
        return f"{', '.join(said)} in Slurm{f': {raw.reason}' if raw.reason else ''}"
    if any(one.is_up for one in through):
        return ""
    return ", ".join(f"partition `{one.name}` is {one.state} in Slurm" for one in through)


def _boot(raw: RawNode) -> Boot | None:
    """None also where its slurmd says that it is older than the machine: then its clock has been set since,
    and by how much the date of the boot has moved nobody knows.
    """
    if raw.booted_at is None or raw.slurmd_at is None or raw.slurmd_at < raw.booted_at - JITTER_S:
        return None
    return Boot(machine=raw.address, at=raw.booted_at)


def what_shuts(name: str, node: SlurmNode | None) -> str:
    """Why what waits at Slurm for this node waits in vain, in words; empty: it does not."""
    if node is None:
        return _absent(name)
    return f"`{name}` takes no work: {node.shut}" if node.shut else ""


def mute_since(nodes: Iterable[SlurmNode], before: Mapping[str, float], now: float) -> dict[str, float]:
    """By name: since when nodes that do not answer now have not, as far as anybody has looked."""
    return {node.facts.name: before.get(node.facts.name, now) for node in nodes if node.mute}


def foreign_since(
    nodes: Iterable[SlurmNode], ours: Collection[str], before: Mapping[str, float], now: float
) -> dict[str, float]:
    """By name: since when nodes on which nothing is ours are given to jobs, as far as anybody has looked."""
    return {
        node.facts.name: before.get(node.facts.name, now)
        for node in nodes
        if node.is_taken and node.facts.name not in ours
    }


def what_changed(order: Order, before: SlurmNode | None, after: SlurmNode | None) -> str | None:
    """What of the order's node is not as it was when somebody chose it, in words; None: nothing we know."""
    if after is None:
        return _absent(order.node)
    has, limits = after.facts, order.limits
    if limits.cpus > has.cpus or (limits.memory_bytes or 0) > has.memory_bytes:
        return f"`{order.node}` has {has.cpus:g} CPUs and {has.memory_bytes >> 20} MiB now"
    if len(order.gpu_ids) > len(has.gpus):
        return f"`{order.node}` has {len(has.gpus)} GPUs now"
    if before is not None and _parts(before) != _parts(after):
        return f"`{order.node}` was changed at Slurm a moment ago"
    return None


def _absent(name: str) -> str:
    return f"`{name}` is not among Slurm's nodes for us any more"


def _parts(node: SlurmNode) -> tuple[object, ...]:
    """What it has and where it belongs, whether or not it takes work now."""
    facts = node.facts
    return facts.cpus, facts.memory_bytes, facts.pool, facts.labels, node.gpu_kinds


def _gpu_kinds(gres: str) -> tuple[str, ...]:
    found: list[str] = []
    for match in _GPUS.finditer(gres):
        found += [match["kind"] or ""] * int(match["count"])
    return tuple(found)
