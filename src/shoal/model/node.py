"""Nodes: what an engine found on them, and what people decided about them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from math import inf

import msgspec

SLICE = re.compile(r"[0-9]+g\.[0-9]+gb")
"""How NVIDIA names the profile of a MIG slice: `1g.10gb`."""


@cache
def kinds_of(asked: str) -> frozenset[str]:
    """The kinds that `A100|H100` names: devices of any of them will do."""
    return frozenset(asked.split("|"))


@cache
def is_slice(kind: str) -> bool:
    """Whether devices of this kind are parts of a GPU: given only to those who ask for them by kind."""
    return SLICE.search(kind) is not None


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One device, or one MIG slice of one, whose kind is `H100-1g.10gb`.

    `index` is the driver's own numbering, by which people and the scheduler name it; slices come after.

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
    """Whether it answers, and its cluster gives it work."""
    closed: str = ""
    """Why its cluster gives it no work though it answers there, in the cluster's words: it is not alive then.
    Empty where it is, or is silent."""
    is_busy: bool = False
    """Its cluster runs somebody else's work there: what we give it may have to wait, so it is taken last."""
    confinement: str = ""
    """Which walls stand around a job here, e.g. `cgroup1 bubblewrap uid`; `unknown` until somebody knows."""
    labels: dict[str, str] = {}
    """Topology levels among them: `zone`, `fabric`, `rack`, `nvlink`."""
    remarks: tuple[str, ...] = ()
    """What one might expect there and the engine did not find, and why."""

    @property
    def answers(self) -> bool:
        """Whether its cluster hears from it, and gives it work or not."""
        return self.is_alive or bool(self.closed)


LEVELS = ("zone", "fabric", "rack", "nvlink")
"""Of the topology, from the widest to the closest. Other labels are levels that lie inside nothing."""


POWER_LABELS = ("idle_watts", "gpu_watts", "cpu_watts")
"""What a node draws: at rest, and for each GPU and each CPU in use."""


def watts_of(labels: Mapping[str, str], name: str) -> float | None:
    """The number of watts that a label says, nothing where there is none; None: it says no such number."""
    try:
        watts = float(labels.get(name, "0"))
    except ValueError:
        return None
    return watts if 0 <= watts < inf else None


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
    is_gone: bool = False
    """Its engine has answered for long without listing it: no place that work could ever have. Kept for what
    people decided about it, until it is listed again or removed."""
    version: int = 1

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def takes_work(self) -> bool:
        return self.state is NodeState.READY and self.facts.is_alive and self.no_watts is None

    @property
    def is_closed(self) -> bool:
        """It answers and nobody here decided anything about it, and yet it takes no work: it says why."""
        return self.state is NodeState.READY and self.facts.answers and not self.takes_work

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the engine says, and what we make of it."""
        gone = (
            "the cluster lists it no more, so that it counts for no job; if that is for good: "
            f"`shoal nodes remove {self.name}`"
        )
        busy = "others' work is on it, by its cluster's word: ours goes elsewhere first"
        ours = (self.no_watts, gone if self.is_gone else None, busy if self.facts.is_busy else None)
        return (*self.facts.remarks, *(told for told in ours if told is not None))

    @property
    def no_watts(self) -> str | None:
        """Why it is closed, where its labels do not say what it draws: a cap on its rack means nothing."""
        labels = self.facts.labels
        wrong = next((name for name in POWER_LABELS if watts_of(labels, name) is None), None)
        if wrong is None:
            return None
        return f"closed until its label `{wrong}` is a number of watts, such as 700: it is `{labels[wrong]}`"
