"""A node as Slurm describes it, by either transport, and what that means to Shoal. Pure.

Its pool is the partition that jobs on it go to first; its other usable partitions are labels.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

import msgspec

from shoal.engines.remote.cluster_observation import JITTER_S, Boot
from shoal.engines.slurm.partitions import LABEL, Partition, UsablePartitions
from shoal.model.node import Gpu, NodeFacts
from shoal.wire import TaskSpec

DOWN = frozenset({"DOWN", "FAIL", "FAILING", "FUTURE", "NOT_RESPONDING", "ERROR"})
ASLEEP = frozenset({"POWERED_DOWN", "POWERING_DOWN", "POWERING_UP"})
"""Slurm wakes these nodes for a job: they take work, and report nothing."""
CLOSED = frozenset({"DRAIN", "DRAINED", "DRAINING", "MAINTENANCE", "RESERVED"})
"""As `scontrol` and slurmrestd spell them; `sinfo` has shorter words."""
TAKEN = frozenset({"ALLOCATED", "MIXED"})
_GPUS = re.compile(r"gpu(?::(?P<kind>[A-Za-z0-9_.-]+))?:(?P<count>[0-9]+)")
_OTHERS = re.compile(r"(?:^|,)(?!gpu\b)([A-Za-z][A-Za-z0-9_.-]*)(?=[:,(]|$)")
DRAINED = frozenset({"DRAIN", "DRAINED", "DRAINING"})
IN_WORDS = {"MAINTENANCE": "in maintenance", "RESERVED": "reserved"}
UNKILLED = "kill task failed"
"""Part of the reason with which slurmd drains a node after it gave up a job whose processes do not die. A
node that is drained already keeps its reason, so Slurm does not report the processes."""
GRES = "gres."
"""Prefix of the label for what Slurm counts there besides GPUs."""
SwitchLabels = Mapping[str, Mapping[str, str]]
"""By node: the switches above it, as labels."""


class RawNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node in Slurm's words."""

    name: str
    address: str
    states: frozenset[str]
    """`IDLE`, `DRAIN`: each word of its state."""
    reason: str = ""
    features: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    cpus: float = 1.0
    memory_mb: int = 1
    """The memory that jobs may use, without what is reserved for the system (MemSpecLimit)."""
    disk_mb: int = 0
    gres: str = ""
    booted_at: float | None = None
    """By the wall clock."""
    slurmd_at: float | None = None
    """When its slurmd was started, by the wall clock at that time."""


class SlurmNode(msgspec.Struct, frozen=True, kw_only=True):
    facts: NodeFacts
    boot: Boot | None
    """None: unknown now. The address identifies the machine, because Slurm has nothing else that does."""
    is_responding: bool
    """Its slurmd responds, whether or not the node takes work: a drained one also reports what runs there."""
    gpu_kinds: tuple[str, ...] = ()
    """The kind of each GPU by its index, as Slurm spells it; empty if it names none."""
    partitions: tuple[str, ...] = ()
    """All partitions that it is in."""
    is_drained: bool = False
    unusable_reason: str = ""
    """Why it starts nothing until a person acts, in Slurm's words. Empty: it does, or has been silent for a
    moment."""
    unresponsive_reason: str = ""
    """That its slurmd does not respond, in Slurm's words, which calls it down after SlurmdTimeout. Empty:
    it responds, or the node sleeps."""
    is_asleep: bool = False
    """Asleep, or about to wake, maybe at another address."""
    is_allocated: bool = False
    """All or part of it is given to jobs of any user."""
    unkilled: str = ""
    """That processes of a job which Slurm calls over did not die there, in Slurm's words, which do not say
    whose they are. Empty: it knows of none."""

    @property
    def reports_unkilled(self) -> bool:
        """Whether Slurm would report processes that do not die there, and reports none."""
        return self.is_responding and not self.is_drained and not self.unkilled


def slurm_nodes(
    raw_nodes: Iterable[RawNode], switch_labels: SwitchLabels, partitions: UsablePartitions
) -> list[SlurmNode]:
    """Return the nodes in partitions that jobs may use."""
    usable = ((raw, partitions.among(raw.partitions)) for raw in raw_nodes)
    return [_node(raw, switch_labels.get(raw.name, {}), through) for raw, through in usable if through]


def by_name(nodes_now: Iterable[SlurmNode], before: Mapping[str, SlurmNode]) -> dict[str, SlurmNode]:
    """Return the nodes by name, with what was known `before`.

    That processes did not die there holds until a person resumes the node, whatever its reason says in the
    meantime.
    """
    nodes = {node.facts.name: node for node in nodes_now}
    for name, node in nodes.items():
        if name in before and not node.unkilled and not node.reports_unkilled:
            nodes[name] = msgspec.structs.replace(node, unkilled=before[name].unkilled)
    return nodes


def _node(raw: RawNode, switch_labels: Mapping[str, str], partitions: list[Partition]) -> SlurmNode:
    states = raw.states - {"NOT_RESPONDING"} if raw.states & ASLEEP else raw.states
    closed = sorted(states & (DOWN | CLOSED))
    reason = f"Slurm says {' '.join([*closed, raw.reason]).strip()}"
    remarks = [reason] if closed else []
    if not any(partition.is_up for partition in partitions):
        remarks += [
            f"Slurm says partition `{partition.name}` is {partition.state}" for partition in partitions
        ]
    labels = {f"feature.{feature}": "yes" for feature in raw.features}
    labels |= {f"{LABEL}{partition.name}": "yes" for partition in partitions}
    labels |= {f"{GRES}{name}": "yes" for name in _OTHERS.findall(raw.gres)}
    labels |= switch_labels
    kinds, is_responding = _gpu_kinds(raw.gres), not states & (DOWN | ASLEEP)
    facts = NodeFacts(
        name=raw.name,
        pool=partitions[0].name,
        address=raw.address,
        cpus=raw.cpus,
        memory_bytes=raw.memory_mb << 20,
        disk_bytes=raw.disk_mb << 20,
        gpus=tuple(Gpu(index=index, kind=(kind or "GPU").upper()) for index, kind in enumerate(kinds)),
        is_alive=not remarks,
        closed="" if states & DOWN else _closed_reason(raw, states & CLOSED, partitions),
        confinement="unknown",
        labels=labels,
        remarks=tuple(remarks),
    )
    return SlurmNode(
        facts=facts,
        boot=_boot(raw) if is_responding else None,
        is_responding=is_responding,
        gpu_kinds=kinds,
        partitions=raw.partitions,
        unkilled=f"Slurm says of `{raw.name}`: {raw.reason}" if UNKILLED in raw.reason.lower() else "",
        is_drained=bool(states & DRAINED),
        unusable_reason=reason if closed not in ([], ["NOT_RESPONDING"]) else "",
        unresponsive_reason=reason if "NOT_RESPONDING" in closed else "",
        is_asleep=bool(states & ASLEEP),
        is_allocated=bool(states & TAKEN),
    )


def _closed_reason(raw: RawNode, closed: frozenset[str], partitions: list[Partition]) -> str:
    """Return, in words, why Slurm gives a node nothing though it talks to it or would wake it; empty: it
    does not.
    """
    if closed:
        states = sorted({"drained" if state in DRAINED else IN_WORDS[state] for state in closed})
        return f"{', '.join(states)} in Slurm{f': {raw.reason}' if raw.reason else ''}"
    if any(partition.is_up for partition in partitions):
        return ""
    return ", ".join(
        f"partition `{partition.name}` is {partition.state} in Slurm" for partition in partitions
    )


def _boot(raw: RawNode) -> Boot | None:
    """Return the node's boot; None if it is unknown.

    It is also unknown if slurmd claims to be older than the machine: then the clock was set since, and the
    boot's date may have moved by any amount.
    """
    if raw.booted_at is None or raw.slurmd_at is None or raw.slurmd_at < raw.booted_at - JITTER_S:
        return None
    return Boot(machine=raw.address, at=raw.booted_at)


def explain_unusable(name: str, node: SlurmNode | None) -> str:
    """Return why a job that waits at Slurm for this node waits in vain, in words; empty: it does not."""
    if node is None:
        return _absent(name)
    return f"`{name}` takes no work: {node.unusable_reason}" if node.unusable_reason else ""


def unresponsive_since(
    nodes: Iterable[SlurmNode], before: Mapping[str, float], now: float
) -> dict[str, float]:
    """Return, by name, since when nodes that do not respond now have not, in all queries."""
    return {node.facts.name: before.get(node.facts.name, now) for node in nodes if node.unresponsive_reason}


def foreign_since(
    nodes: Iterable[SlurmNode], ours: Collection[str], before: Mapping[str, float], now: float
) -> dict[str, float]:
    """Return, by name, since when nodes without tasks of ours have been given to jobs, in all queries."""
    return {
        node.facts.name: before.get(node.facts.name, now)
        for node in nodes
        if node.is_allocated and node.facts.name not in ours
    }


def describe_change(task_spec: TaskSpec, before: SlurmNode | None, after: SlurmNode | None) -> str | None:
    """Return what has changed on the task spec's node since it was chosen, in words; None: nothing we
    know.
    """
    identity = task_spec.identity
    if after is None:
        return _absent(identity.node)
    has, resources = after.facts, task_spec.resources
    if resources.cpus > has.cpus or (resources.memory_bytes or 0) > has.memory_bytes:
        return f"`{identity.node}` has {has.cpus:g} CPUs and {has.memory_bytes >> 20} MiB now"
    if len(resources.gpu_ids) > len(has.gpus):
        return f"`{identity.node}` has {len(has.gpus)} GPUs now"
    if before is not None and _hardware(before) != _hardware(after):
        return f"`{identity.node}` was changed at Slurm a moment ago"
    return None


def _absent(name: str) -> str:
    return f"`{name}` is not among Slurm's nodes for us any more"


def _hardware(node: SlurmNode) -> tuple[object, ...]:
    """Return its hardware and partition, whether or not it takes work now."""
    facts = node.facts
    return facts.cpus, facts.memory_bytes, facts.pool, facts.labels, node.gpu_kinds


def _gpu_kinds(gres: str) -> tuple[str, ...]:
    kinds: list[str] = []
    for match in _GPUS.finditer(gres):
        kinds += [match["kind"] or ""] * int(match["count"])
    return tuple(kinds)
