"""Nodes: what an engine reports of them, and what people decided about them.

Windows: nodes that are reserved, or closed for maintenance, for a time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from math import inf

import msgspec

SLICE = re.compile(r"[0-9]+g\.[0-9]+gb")
"""The profile of a MIG slice as NVIDIA writes it: `1g.10gb`."""


@cache
def kinds_of(kinds: str) -> frozenset[str]:
    """The kinds that `A100|H100` names. A device of any of them fits."""
    return frozenset(kinds.split("|"))


@cache
def is_slice(kind: str) -> bool:
    """Whether devices of this kind are parts of a GPU. Only jobs that ask for the kind by name get them."""
    return SLICE.search(kind) is not None


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One device, or one MIG slice of a device, whose kind is then `H100-1g.10gb`.

    `index` is the driver's own numbering, which people and the scheduler use. Slices come after whole
    devices. Neither the device file nor CUDA has to count the same way: the device file goes by `minor`, CUDA
    by `uuid`.
    """

    index: int
    kind: str
    uuid: str = ""
    minor: int | None = None
    """N of /dev/nvidiaN. None if the driver has no such file or does not report it."""
    memory_bytes: int = 0


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine reports about a node. Every report replaces it whole, and Shoal never edits it."""

    name: str
    pool: str = "default"
    address: str = "127.0.0.1"
    cpus: float
    memory_bytes: int
    disk_bytes: int
    gpus: tuple[Gpu, ...] = ()
    is_simulated: bool = False
    is_alive: bool = True
    """The node answers, and its cluster gives it work."""
    closed: str = ""
    """Why the cluster gives no work to a node that answers, in the cluster's words. The node is then not
    alive. Empty if the node is alive or silent.
    """
    is_busy: bool = False
    """The cluster runs work of other users there. Our work may have to wait, so the node is chosen last."""
    confinement: str = ""
    """The confinement around a job here, e.g. `cgroup1 bubblewrap uid`. `unknown` until it is reported."""
    labels: dict[str, str] = {}
    """Labels, including the topology levels `zone`, `fabric`, `rack`, `nvlink`."""
    remarks: tuple[str, ...] = ()
    """What the engine expected there and did not find, and why."""

    @property
    def answers(self) -> bool:
        """Whether the cluster hears from the node, with or without giving it work."""
        return self.is_alive or bool(self.closed)


LEVELS = ("zone", "fabric", "rack", "nvlink")
"""Topology levels from the widest to the closest. Other labels are levels that lie inside no level."""


POWER_LABELS = ("idle_watts", "gpu_watts", "cpu_watts")
"""Labels for the power a node draws: at rest, per GPU in use and per CPU in use."""


def watts_of(labels: Mapping[str, str], name: str) -> float | None:
    """The number of watts in a label: 0 without the label, None if the label is no such number."""
    try:
        watts = float(labels.get(name, "0"))
    except ValueError:
        return None
    return watts if 0 <= watts < inf else None


class NodeState(StrEnum):
    """What people or health checks decided about a node."""

    READY = "ready"
    """Takes work."""
    CORDONED = "cordoned"
    """Takes no new work. Running jobs keep running."""
    DRAINING = "draining"
    """Takes no new work. Running jobs are asked to stop and queue again."""
    DRAINED = "drained"
    """Takes no new work, and no attempt holds any part of it: the drain is complete."""
    DEAD = "dead"
    """An operator declared that no process of ours runs there: evidence for replacing its attempts."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node as the control plane knows it."""

    facts: NodeFacts
    engine: str
    state: NodeState = NodeState.READY
    because: str = ""
    by: str = ""
    changed_at: float = 0.0
    is_gone: bool = False
    """The engine has answered for long without listing the node, so the node counts for no job. Shoal keeps
    the record for what people decided about the node, until the engine lists it again or an operator removes
    it.
    """
    version: int = 1

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def takes_work(self) -> bool:
        return self.state is NodeState.READY and self.facts.is_alive and self.power_label_problem is None

    @property
    def is_closed(self) -> bool:
        """The node answers and is not cordoned or drained here, but it takes no work. `closed` has the
        reason.
        """
        return self.state is NodeState.READY and self.facts.answers and not self.takes_work

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the engine remarks, and what Shoal adds."""
        gone = (
            "the cluster no longer lists it, so it counts for no job; if that is final, type "
            f"`shoal nodes remove {self.name}`"
        )
        busy = "the cluster reports other users' work on it, so our jobs go elsewhere first"
        ours = (
            self.power_label_problem,
            gone if self.is_gone else None,
            busy if self.facts.is_busy else None,
        )
        return (*self.facts.remarks, *(remark for remark in ours if remark is not None))

    @property
    def power_label_problem(self) -> str | None:
        """Why the node is closed if its power labels do not say what it draws. A power cap on its rack would
        mean nothing.
        """
        labels = self.facts.labels
        wrong = next((name for name in POWER_LABELS if watts_of(labels, name) is None), None)
        if wrong is None:
            return None
        return f"closed until its label `{wrong}` is a number of watts, such as 700: it is `{labels[wrong]}`"


class WindowKind(StrEnum):
    MAINTENANCE = "maintenance"
    """The nodes take no job."""
    RESERVATION = "reservation"
    """The nodes take only jobs of one project and of the projects below it."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes closed or reserved from `from_at` until just before `until_at`. Windows that share a node never
    overlap.
    """

    window_id: str
    kind: WindowKind
    nodes: tuple[str, ...]
    from_at: float
    until_at: float
    project: str | None = None
    """The project of a reservation. None for maintenance."""
    because: str = ""
    by: str = ""
    created_at: float = 0.0

    def overlaps(self, other: Window) -> tuple[str, ...]:
        """The nodes on which the two windows collide."""
        if self.from_at >= other.until_at or other.from_at >= self.until_at:
            return ()
        return tuple(sorted(set(self.nodes) & set(other.nodes)))
