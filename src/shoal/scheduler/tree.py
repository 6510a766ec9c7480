"""What every project holds, with all projects below it, against what it is guaranteed and allowed.

Kept up to date with each start and end, in steps that grow with the depth of the tree alone. A project
may start work while neither it nor a project above it passes its ceiling: its limit, or its quota and
what it may borrow. Decides nothing about order or eviction, but answers what those ask.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from math import inf

import msgspec

from shoal.errors import Bug
from shoal.model.people import Devices
from shoal.scheduler.amounts import millicpus_there
from shoal.scheduler.devices import Amount, ProjectView

NOTHING = Devices()


class Device(StrEnum):
    GPUS = "gpus"
    CPUS = "cpus"


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Which project up the tree says no, and its numbers, in thousandths."""

    project: str
    """The one that asked."""
    by: str
    """The one whose ceiling it is: the same, or one above it."""
    device: Device
    asked: int
    in_use: int
    limit: int | None
    quota: int | None
    borrow: int | None
    kept: int = 0
    """Of what is left, so much is for one who is due."""

    @property
    def is_by_limit(self) -> bool:
        return self.limit is not None and self.limit <= self.allowed

    @property
    def allowed(self) -> int:
        return int(_ceiling(self.limit, self.quota, self.borrow))


class _Bounds:
    """Of one project and one device."""

    __slots__ = ("borrow", "ceiling", "limit", "quota")

    def __init__(self, limit: int | None, quota: int | None, borrow: int | None) -> None:
        self.limit = limit
        self.quota = quota
        self.borrow = borrow
        self.ceiling = _ceiling(limit, quota, borrow)

    def has_quota_for(self, amount: int) -> bool:
        return self.quota is not None and amount <= self.quota


class _Node:
    """A project in its place. `line` begins with it and ends at the top of the tree."""

    __slots__ = ("bounded", "cpus", "gpus", "has_children", "held", "line", "own", "quotas", "view", "views")

    def __init__(self, view: ProjectView, parent: _Node | None) -> None:
        self.view = view
        self.gpus, self.cpus = _bounds(view)
        self.own = self.held = Amount(0, 0)
        self.has_children = False
        self.line: tuple[_Node, ...] = (self, *(parent.line if parent else ()))
        self.views: tuple[ProjectView, ...] = (view, *(parent.views if parent else ()))
        # Where nobody set anything these are empty, and asking them costs nothing.
        self.bounded = tuple(n for n in self.line if min(n.gpus.ceiling, n.cpus.ceiling) < inf)
        self.quotas = tuple(n for n in self.line if (n.gpus.quota, n.cpus.quota) != (None, None))
        if parent is not None:
            parent.has_children = True

    def guarantees(self, asked: Amount) -> bool:
        """Whether this and all it holds is within its quota. GPUs count where any are asked for, CPUs
        where none are or the quota names them.
        """
        cpus = self.held.millicpus + asked.millicpus
        if not asked.milligpus:
            return self.cpus.has_quota_for(cpus)
        if not self.gpus.has_quota_for(self.held.milligpus + asked.milligpus):
            return False
        return self.cpus.quota is None or self.cpus.has_quota_for(cpus)

    def above_quota(self) -> Amount:
        return Amount(
            max(self.held.milligpus - (self.gpus.quota or 0), 0),
            max(self.held.millicpus - (self.cpus.quota or 0), 0),
        )


class Tree:
    """Projects that nobody told of stand at the top of the tree, with nothing guaranteed or limited."""

    def __init__(self, views: Iterable[ProjectView] = ()) -> None:
        self.version = 0
        """Grows whenever the shape or the settings change."""
        self.has_ceilings = False
        """Whether anybody can be refused anything."""
        self._nodes: dict[str, _Node] = {}
        self._kept: dict[tuple[str, Device], int] = {}
        self.change(views)

    def change(self, views: Iterable[ProjectView]) -> None:
        """Replace every project's settings and place. What each one holds stays."""
        held = {name: node.own for name, node in self._nodes.items()}
        told = {view.name: view for view in views}
        self.version += 1
        self._nodes = {}
        for name in sorted(told):
            self._plant(name, told)
        for name, own in held.items():
            self.take(name, own)
        self.has_ceilings = any(node.bounded for node in self._nodes.values())

    def take(self, project: str, amount: Amount) -> None:
        """The project holds so much more."""
        self._add(project, amount.milligpus, amount.millicpus)

    def give(self, project: str, amount: Amount) -> None:
        """The project gave so much back."""
        self._add(project, -amount.milligpus, -amount.millicpus)

    def held(self, project: str) -> Amount:
        """By it and all below it."""
        return self._node(project).held

    def refusal(self, project: str, asked: Amount) -> Refusal | None:
        """Who does not allow so much more: the project itself, else the nearest above it.

        A device that is not asked for refuses nothing, even where more than its ceiling is held.
        """
        for node in self._node(project).bounded:
            gpus = node.held.milligpus + asked.milligpus
            cpus = node.held.millicpus + asked.millicpus
            if asked.milligpus and gpus > node.gpus.ceiling:
                return _refused(project, node, Device.GPUS, asked.milligpus, node.held.milligpus)
            if asked.millicpus and cpus > node.cpus.ceiling:
                return _refused(project, node, Device.CPUS, asked.millicpus, node.held.millicpus)
        return self._kept_from(project, asked) if self._kept else None

    def keep(self, refusal: Refusal) -> None:
        """Leave as much below that ceiling as was refused, until `keep_nothing`, for the first who asks.

        Else smaller jobs of the project would take whatever is given back, one after the other, without end.
        """
        self._kept.setdefault((refusal.by, refusal.device), refusal.asked)

    def keep_nothing(self) -> None:
        self._kept.clear()

    def _kept_from(self, project: str, asked: Amount) -> Refusal | None:
        """Who keeps so much for another; not from what is guaranteed further down, where that one is not."""
        for node in self._node(project).line:
            for device, more, bounds, held in (
                (Device.GPUS, asked.milligpus, node.gpus, node.held.milligpus),
                (Device.CPUS, asked.millicpus, node.cpus, node.held.millicpus),
            ):
                kept = self._kept.get((node.view.name, device), 0)
                if more and kept and held + more + kept > bounds.ceiling:
                    return msgspec.structs.replace(_refused(project, node, device, more, held), kept=kept)
            if node.guarantees(asked):
                return None
        return None

    def is_within_quota(self, project: str, asked: Amount) -> bool:
        """Whether so much more is guaranteed: by its own quota, or by that of a project above it."""
        return any(node.guarantees(asked) for node in self._node(project).quotas)

    def over_quota(self, project: str) -> Amount:
        """What it holds above its quota, with all below it: without a quota that is everything."""
        return self._node(project).above_quota()

    def may_reclaim(self, project: str, asked: Amount, victim: str) -> bool:
        """Whether `victim` holds borrowed devices that are guaranteed to `project`, which asks for some.

        Looked at below the nearest project that both are part of: on the side of `project` somebody's
        quota covers what is asked, and on the side of `victim` everybody is above their quota. Every
        eviction changes the answer: `give` what it frees before asking again.
        """
        ours, theirs = self._node(project).line, self._node(victim).line
        mine = (node for node in ours if node not in theirs)
        others = (node.above_quota() for node in theirs if node not in ours)
        if not any(node.guarantees(asked) for node in mine):
            return False
        return all(over.milligpus > 0 if asked.milligpus else over.millicpus > 0 for over in others)

    def has_quota(self, project: str) -> bool:
        """Whether anything is guaranteed to it, or to a project above it."""
        return bool(self._node(project).quotas)

    def covered(self, project: str, asked: Amount) -> tuple[bool, ...]:
        """At each level from the top, whether a quota from there down to the project guarantees so much."""
        found, levels = False, []
        for node in self._node(project).line:
            found = found or node.guarantees(asked)
            levels.append(found)
        return tuple(reversed(levels))

    def line(self, project: str) -> tuple[ProjectView, ...]:
        """The project and those above it, to the top of the tree."""
        return self._node(project).views

    def has_children(self, project: str) -> bool:
        return self._node(project).has_children

    def _add(self, project: str, milligpus: int, millicpus: int) -> None:
        node = self._node(project)
        gpus, cpus = node.own
        node.own = Amount(gpus + milligpus, cpus + millicpus)
        for above in node.line:
            gpus, cpus = above.held
            above.held = Amount(gpus + milligpus, cpus + millicpus)

    def _node(self, project: str) -> _Node:
        node = self._nodes.get(project)
        return node if node is not None else self._plant(project, {})

    def _plant(self, name: str, told: dict[str, ProjectView], below: frozenset[str] = frozenset()) -> _Node:
        """Put it in its place, below its parents, unless it is there already."""
        if name in below:
            raise Bug(f"project `{name}` is above itself in the tree", circle=sorted(below))
        if name not in self._nodes:
            view = told.get(name) or ProjectView(name=name)
            parent = self._plant(view.parent, told, below | {name}) if view.parent is not None else None
            self._nodes[name] = _Node(view, parent)
        return self._nodes[name]


def _bounds(view: ProjectView) -> tuple[_Bounds, _Bounds]:
    limit, quota, borrow = view.limit or NOTHING, view.quota or NOTHING, view.borrow or NOTHING
    return (
        _Bounds(_milli(limit.gpus), _milli(quota.gpus), _milli(borrow.gpus)),
        _Bounds(_milli(limit.cpus), _milli(quota.cpus), _milli(borrow.cpus)),
    )


def _milli(devices: float | None) -> int | None:
    return None if devices is None else millicpus_there(devices)


def _ceiling(limit: int | None, quota: int | None, borrow: int | None) -> float:
    borrowed = inf if quota is None or borrow is None else quota + borrow
    return borrowed if limit is None else min(limit, borrowed)


def _refused(project: str, node: _Node, device: Device, asked: int, in_use: int) -> Refusal:
    bounds = node.gpus if device is Device.GPUS else node.cpus
    return Refusal(
        project=project,
        by=node.view.name,
        device=device,
        asked=asked,
        in_use=in_use,
        limit=bounds.limit,
        quota=bounds.quota,
        borrow=bounds.borrow,
    )
