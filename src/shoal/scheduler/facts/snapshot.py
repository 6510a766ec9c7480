"""What the scheduler is shown: immutable, complete, and small enough to record with a decision."""

from __future__ import annotations

import msgspec

from shoal.model.attempt import Allocation
from shoal.model.job import DependencyKind, ResourceRequest
from shoal.model.node import Window
from shoal.scheduler.facts.amounts import ProjectInfo
from shoal.scheduler.order.fair_share import Usage


class GpuInfo(msgspec.Struct, frozen=True, gc=False):
    index: int
    kind: str


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A node's whole capacity. What is in use follows from the holdings."""

    name: str
    pool: str = "default"
    cpus: float
    memory_bytes: int
    disk_bytes: int = 0
    gpus: tuple[GpuInfo, ...] = ()
    labels: dict[str, str] = {}
    is_busy: bool = False
    """Work from outside Shoal runs on it, of unknown size. Of the nodes that fit, it is chosen last."""
    closed_because: str | None = None
    """Why it takes no work (`drained by ana`); None: it takes work."""
    closed_at: float | None = None
    """Since when, if that is known."""
    closed_note: str = ""
    """The note of the person that closed it (`bad NVLink`)."""


class Holding(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An attempt that holds resources now."""

    attempt_id: str
    job_id: str
    project: str
    priority: int
    allocation: Allocation
    placed_at: float
    time_limit_s: float | None = None
    array_id: str | None = None
    label: str = ""
    """The job's name for people: `vision/17 train-7b`."""
    owner: str = ""
    name: str = ""
    is_stopping: bool = False
    """It was asked to stop and has not stopped."""
    grows_to: int | None = None
    """With how many nodes it restarts after that, if it was stopped to grow."""
    checkpoint_at: float | None = None
    """When its last known checkpoint was saved."""
    request: ResourceRequest | None = None
    """What it asked for; None: not known."""
    excluded_nodes: tuple[str, ...] = ()
    avoided_nodes: tuple[str, ...] = ()
    """Nodes that take one of its tasks only if no other node can."""
    num_evicted: int = 0
    """How often its job was evicted."""
    is_endless: bool = False
    """It runs until a person or a service stops it, as replicas do: its end cannot be predicted."""


class TaskLoss(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A lost task of a running attempt. Another node shall take its place, and the other tasks wait for
    that.
    """

    attempt_id: str
    node: str


class UnmetDependency(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A job that has not ended and must end in the way named."""

    label: str
    on: DependencyKind


class Candidate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A queued attempt. `order` is its place among equals: lower came first, and then the lower `number`."""

    attempt_id: str
    job_id: str
    project: str
    queue: str = "default"
    label: str = ""
    priority: int = 0
    order: int
    number: int = 0
    """Its job's number in the project. The elements of an array are submitted at the same time, so this
    orders them."""
    submitted_at: float
    not_before: float = 0.0
    unmet: tuple[UnmetDependency, ...] = ()
    request: ResourceRequest
    excluded_nodes: tuple[str, ...] = ()
    avoided_nodes: tuple[str, ...] = ()
    """Nodes that it uses only if it cannot start on others."""
    array_id: str | None = None
    array_at_once: int | None = None
    owner: str = ""
    name: str = ""
    expected_s: float | None = None
    """How long it is expected to run; None: not known."""
    due_at: float | None = None
    """From then on it goes before all jobs that came later. None: it is due."""
    score: float | None = None
    """Before it is due, candidates with a lower score go first. None: last."""
    deadline_at: float | None = None
    """When it should have ended."""
    num_evicted: int = 0
    """How often its job was evicted."""
    is_endless: bool = False
    """Once started, it runs until a person or a service stops it, as replicas do."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    nodes: tuple[NodeInfo, ...]
    holdings: tuple[Holding, ...]
    candidates: tuple[Candidate, ...]
    projects: tuple[ProjectInfo, ...] = ()
    usages: tuple[Usage, ...] = ()
    """What each project used lately. Each usage includes what the project holds now, up to the usage's own
    date."""
    windows: tuple[Window, ...] = ()
    losses: tuple[TaskLoss, ...] = ()
    """At most one of each attempt. The next plan decides all of them."""
