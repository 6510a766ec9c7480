"""What the scheduler answers: who starts where, and for everybody else why not."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from shoal.model.attempt import Allocation


class Why(StrEnum):
    """The one dominant reason a job does not start. Stable: `--json` and dashboards rely on it."""

    DEPENDENCY = "dependency"
    """Jobs it comes after have not ended."""
    BACKOFF = "backoff"
    """It failed and waits before it is tried again."""
    ARRAY_LIMIT = "array_limit"
    """Its array already has as many elements running as it allows."""
    NO_NODES = "no_nodes"
    """There is no node at all, or none is known: the cluster has not answered yet."""
    NEVER_FITS = "never_fits"
    """No set of nodes of this cluster, all free, could hold it."""
    NODES_CLOSED = "nodes_closed"
    """It would fit, but the nodes it needs are drained, cordoned or lost."""
    NODES_EXCLUDED = "nodes_excluded"
    """It would fit, but only on nodes that its own log rules excluded."""
    RESOURCES = "resources"
    """It waits for running jobs to give back what it needs."""
    BEHIND = "behind"
    """What it needs is free, but kept for a job that comes first."""
    QUOTA = "quota"
    """Its project, or one above it, has its quota and all that it may borrow."""
    LIMIT = "limit"
    """Its project, or one above it, has as much as its limit allows."""
    UNREACHABLE = "unreachable"
    """It was started, and nobody has heard from it since. Said by the control plane, not by a plan."""
    NOT_BEGUN = "not_begun"
    """It was placed, and its engine has not begun it. Said by the control plane, not by a plan."""
    ORPHANED = "orphaned"
    """Its supervisor is dead and what that left is not. Said by the control plane, not by a plan."""
    MAKING_ROOM = "making_room"
    """Jobs that give way to it are stopping."""
    WINDOW = "window"
    """What it needs is free, but in maintenance or reserved, or will be before it must have ended."""
    POWER = "power"
    """Nodes are free, but their rack may not draw more power."""
    TOPOLOGY = "topology"
    """Enough nodes are free, but not close enough together."""
    FEWER_NODES = "fewer_nodes"
    """It runs, on fewer nodes than it could use."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    attempt_id: str
    allocation: Allocation


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """`sentence` stands alone; `details` are further lines; `facts` are the numbers behind both."""

    attempt_id: str
    job_id: str
    why: Why
    sentence: str
    details: tuple[str, ...] = ()
    hint: str | None = None
    facts: dict[str, Any] = {}


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """A waiting job's start, by the time limits of what runs: nobody who starts before it delays it."""

    attempt_id: str
    job_id: str
    at: float | None
    """None: its nodes are kept for it, and nobody knows when the last of them is free."""
    nodes: tuple[str, ...]


class Ground(StrEnum):
    """By what right a job is evicted."""

    PRIORITY = "priority"
    """A class that preempts, over a lesser priority."""
    QUOTA = "quota"
    """Devices guaranteed to the one project, borrowed by the other."""
    GROWTH = "growth"
    """Nobody else's: it goes on with more nodes, which stand idle."""


class Eviction(msgspec.Struct, frozen=True, kw_only=True):
    """A running attempt that is asked to stop, so that another can start."""

    attempt_id: str
    for_attempt_id: str
    ground: Ground
    lost_s: float
    """Seconds of its run that are done again, at most, with those that starting again takes."""
    lost_device_s: float
    """The same on all it holds; CPUs count as parts of a GPU."""
    saved_at: float | None
    """Its last checkpoint that anybody knows of."""
    likely_device_s: float = 0.0
    """What it was chosen by: less where no checkpoint of it is known, but those of others are."""
    num_nodes: int | None = None
    """How many nodes it goes on with, where it makes room for itself."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    starts: tuple[Start, ...] = ()
    promises: tuple[Promise, ...] = ()
    evictions: tuple[Eviction, ...] = ()
    """Asked to stop; they hold what they have until they are gone, and then it is kept for whom it was."""
    explanations: tuple[Explanation, ...] = ()
    look_again_at: float | None = None
    """When another plan may differ from this one though nothing has happened."""
