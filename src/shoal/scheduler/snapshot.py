"""What the scheduler is shown: immutable, complete, and small enough to record with a decision."""

from __future__ import annotations

import msgspec

from shoal.model.attempt import Allocation
from shoal.model.job import DependencyKind
from shoal.model.request import Request
from shoal.model.window import Window
from shoal.scheduler.devices import ProjectView
from shoal.scheduler.fair import Usage


class GpuView(msgspec.Struct, frozen=True, gc=False):
    index: int
    kind: str


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node's whole capacity. What is in use follows from the holdings."""

    name: str
    pool: str = "default"
    cpus: float
    memory_bytes: int
    disk_bytes: int = 0
    gpus: tuple[GpuView, ...] = ()
    labels: dict[str, str] = {}
    is_busy: bool = False
    """Somebody else's work is on it that we know no more about: of nodes that fit it is taken last."""
    closed_because: str | None = None
    """Why it takes no work (`drained by ana`); None: it does."""
    closed_at: float | None = None
    """Since when, where that is known."""
    closed_note: str = ""
    """What whoever closed it said of it (`bad NVLink`)."""


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
    """How people name the job: `vision/17 train-7b`."""
    owner: str = ""
    name: str = ""
    is_leaving: bool = False
    """It was asked to stop and is not gone yet."""
    grows_to: int | None = None
    """With how many nodes its job goes on then, where it was asked for that."""
    checkpoint_at: float | None = None
    """When it last saved what it had done, as far as anybody knows."""
    request: Request | None = None
    """What it asked for; None: nobody knows."""
    excluded_nodes: tuple[str, ...] = ()
    num_evicted: int = 0
    """How often its job gave way to others."""
    is_endless: bool = False
    """It runs until a person or a service stops it, as replicas do: its end cannot be predicted."""


class UnmetDependency(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A job that has not ended yet and must, in the way named."""

    label: str
    on: DependencyKind


class Candidate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A queued attempt. `order` is its place among equals: lower was first, and then the lower `number`."""

    attempt_id: str
    job_id: str
    project: str
    queue: str = "default"
    label: str = ""
    priority: int = 0
    order: int
    number: int = 0
    """Its job's in the project. The elements of an array were submitted at one moment, and go by it."""
    submitted_at: float
    not_before: float = 0.0
    unmet: tuple[UnmetDependency, ...] = ()
    request: Request
    excluded_nodes: tuple[str, ...] = ()
    avoided_nodes: tuple[str, ...] = ()
    """It starts on others if it can, and else on these."""
    array_id: str | None = None
    array_at_once: int | None = None
    owner: str = ""
    name: str = ""
    expected_s: float | None = None
    """How long it is expected to run; None: nobody knows."""
    due_at: float | None = None
    """From then on it goes before all who came later. None: it is due."""
    score: float | None = None
    """Until then those with less go first. None: last."""
    deadline_at: float | None = None
    """When it should have ended."""
    num_evicted: int = 0
    """How often its job gave way to others."""
    is_endless: bool = False
    """Once started it runs until a person or a service stops it, as replicas do."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    nodes: tuple[NodeView, ...]
    holdings: tuple[Holding, ...]
    candidates: tuple[Candidate, ...]
    projects: tuple[ProjectView, ...] = ()
    usages: tuple[Usage, ...] = ()
    """What each project had lately, what it holds now included up to each one's date."""
    windows: tuple[Window, ...] = ()
