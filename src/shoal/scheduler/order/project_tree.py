"""What every project holds, with all projects below it, against what it is guaranteed and allowed.

Each start and end updates it in as many steps as the tree is deep. A project may start work while neither it
nor a project above it passes its ceiling. The ceiling is its limit, or its quota plus what it may borrow. The
tree decides nothing about order or eviction, but answers the questions of both.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from math import inf

import msgspec

from shoal.errors import Bug
from shoal.model.people import DeviceAmounts
from shoal.scheduler.facts.amounts import DeviceAmount, ProjectInfo, millicpus_available

NO_DEVICES = DeviceAmounts()


class DeviceKind(StrEnum):
    GPUS = "gpus"
    CPUS = "cpus"


class QuotaRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """Which project up the tree refuses, and its numbers in thousandths."""

    project: str
    """The project that asked."""
    by: str
    """The project whose ceiling it is: the same, or one above it."""
    device: DeviceKind
    requested: int
    in_use: int
    limit: int | None
    quota: int | None
    borrow: int | None
    reserved: int = 0
    """How much of what is left is reserved for a due job."""

    @property
    def is_by_limit(self) -> bool:
        return self.limit is not None and self.limit <= self.allowed

    @property
    def allowed(self) -> int:
        return int(_ceiling(self.limit, self.quota, self.borrow))


class _Bounds:
    """The bounds of one project for one kind of device."""

    __slots__ = ("borrow", "ceiling", "limit", "quota")

    def __init__(self, limit: int | None, quota: int | None, borrow: int | None) -> None:
        self.limit = limit
        self.quota = quota
        self.borrow = borrow
        self.ceiling = _ceiling(limit, quota, borrow)

    def has_quota_for(self, amount: int) -> bool:
        return self.quota is not None and amount <= self.quota


class _ProjectNode:
    """A project in the tree. `ancestry` begins with it and ends at the top of the tree."""

    __slots__ = (
        "ancestry",
        "bounded",
        "cpus",
        "direct",
        "gpus",
        "has_children",
        "held",
        "quotas",
        "view",
        "views",
    )

    def __init__(self, view: ProjectInfo, parent: _ProjectNode | None) -> None:
        self.view = view
        self.gpus, self.cpus = _bounds(view)
        self.direct = self.held = DeviceAmount(0, 0)
        self.has_children = False
        self.ancestry: tuple[_ProjectNode, ...] = (self, *(parent.ancestry if parent else ()))
        self.views: tuple[ProjectInfo, ...] = (view, *(parent.views if parent else ()))
        # If no bounds are set, these are empty and cost nothing to check.
        self.bounded = tuple(n for n in self.ancestry if min(n.gpus.ceiling, n.cpus.ceiling) < inf)
        self.quotas = tuple(n for n in self.ancestry if (n.gpus.quota, n.cpus.quota) != (None, None))
        if parent is not None:
            parent.has_children = True

    def guarantees(self, amount: DeviceAmount) -> bool:
        """Whether `amount` and all that it holds is within its quota.

        GPUs count if any are asked for. CPUs count if no GPUs are, or if the quota names CPUs.
        """
        cpus = self.held.millicpus + amount.millicpus
        if not amount.milligpus:
            return self.cpus.has_quota_for(cpus)
        if not self.gpus.has_quota_for(self.held.milligpus + amount.milligpus):
            return False
        return self.cpus.quota is None or self.cpus.has_quota_for(cpus)

    def above_quota(self) -> DeviceAmount:
        return DeviceAmount(
            max(self.held.milligpus - (self.gpus.quota or 0), 0),
            max(self.held.millicpus - (self.cpus.quota or 0), 0),
        )


class ProjectTree:
    """Projects without settings stand at the top of the tree, with nothing guaranteed or limited."""

    def __init__(self, views: Iterable[ProjectInfo] = ()) -> None:
        self.version = 0
        """Grows whenever the shape or the settings change."""
        self.has_ceilings = False
        """Whether any project can be refused anything."""
        self._nodes: dict[str, _ProjectNode] = {}
        self._reserved: dict[tuple[str, DeviceKind], int] = {}
        self.change(views)

    def change(self, views: Iterable[ProjectInfo]) -> None:
        """Replace every project's settings and place. What each one holds stays."""
        held = {name: node.direct for name, node in self._nodes.items()}
        by_name = {view.name: view for view in views}
        self.version += 1
        self._nodes = {}
        for name in sorted(by_name):
            self._plant(name, by_name)
        for name, direct in held.items():
            self.take(name, direct)
        self.has_ceilings = any(node.bounded for node in self._nodes.values())

    def take(self, project: str, amount: DeviceAmount) -> None:
        """The project holds `amount` more."""
        self._add(project, amount.milligpus, amount.millicpus)

    def give(self, project: str, amount: DeviceAmount) -> None:
        """The project gave `amount` back."""
        self._add(project, -amount.milligpus, -amount.millicpus)

    def held(self, project: str) -> DeviceAmount:
        """Return what it and all projects below it hold."""
        return self._node(project).held

    def refusal(self, project: str, amount: DeviceAmount) -> QuotaRefusal | None:
        """Return which ceiling forbids `amount` more: the project's own, or else the nearest above it.

        A kind of device that is not asked for refuses nothing, even if more than its ceiling is held.
        """
        for node in self._node(project).bounded:
            gpus = node.held.milligpus + amount.milligpus
            cpus = node.held.millicpus + amount.millicpus
            if amount.milligpus and gpus > node.gpus.ceiling:
                return _quota_refusal(project, node, DeviceKind.GPUS, amount.milligpus, node.held.milligpus)
            if amount.millicpus and cpus > node.cpus.ceiling:
                return _quota_refusal(project, node, DeviceKind.CPUS, amount.millicpus, node.held.millicpus)
        return self._refusal_by_reserve(project, amount) if self._reserved else None

    def reserve(self, refusal: QuotaRefusal) -> None:
        """Keep the refused amount free below that ceiling for the first job that asks, until
        `clear_reserved`.

        Otherwise smaller jobs of the project would take whatever is given back, one after the other, without
        end.
        """
        self._reserved.setdefault((refusal.by, refusal.device), refusal.requested)

    def clear_reserved(self) -> None:
        self._reserved.clear()

    def _refusal_by_reserve(self, project: str, amount: DeviceAmount) -> QuotaRefusal | None:
        """Return the ceiling below which `amount` is reserved. What is guaranteed further down is exempt,
        because a due job is not waiting there.
        """
        for node in self._node(project).ancestry:
            for device, more, bounds, held in (
                (DeviceKind.GPUS, amount.milligpus, node.gpus, node.held.milligpus),
                (DeviceKind.CPUS, amount.millicpus, node.cpus, node.held.millicpus),
            ):
                reserved = self._reserved.get((node.view.name, device), 0)
                if more and reserved and held + more + reserved > bounds.ceiling:
                    return msgspec.structs.replace(
                        _quota_refusal(project, node, device, more, held), reserved=reserved
                    )
            if node.guarantees(amount):
                return None
        return None

    def is_within_quota(self, project: str, amount: DeviceAmount) -> bool:
        """Whether `amount` more is guaranteed: by its own quota, or by that of a project above it."""
        return any(node.guarantees(amount) for node in self._node(project).quotas)

    def over_quota(self, project: str) -> DeviceAmount:
        """Return what it holds above its quota, with all projects below it. Without a quota that is
        everything.
        """
        return self._node(project).above_quota()

    def may_reclaim(self, project: str, amount: DeviceAmount, victim: str) -> bool:
        """Whether `victim` holds borrowed devices that are guaranteed to `project`, which asks for some.

        Compare the two lines below their nearest common project. On the side of `project` some quota must
        cover `amount`. On the side of `victim` every project must be above its quota. Every eviction changes
        the answer: call `give` with what it frees before asking again.
        """
        ours, theirs = self._node(project).ancestry, self._node(victim).ancestry
        mine = (node for node in ours if node not in theirs)
        others = (node.above_quota() for node in theirs if node not in ours)
        if not any(node.guarantees(amount) for node in mine):
            return False
        return all(over.milligpus > 0 if amount.milligpus else over.millicpus > 0 for over in others)

    def has_quota(self, project: str) -> bool:
        """Whether anything is guaranteed to it, or to a project above it."""
        return bool(self._node(project).quotas)

    def quota_coverage(self, project: str, amount: DeviceAmount) -> tuple[bool, ...]:
        """Return, for each level from the top, whether a quota from there down to the project guarantees
        `amount`.
        """
        is_covered, levels = False, []
        for node in self._node(project).ancestry:
            is_covered = is_covered or node.guarantees(amount)
            levels.append(is_covered)
        return tuple(reversed(levels))

    def ancestry(self, project: str) -> tuple[ProjectInfo, ...]:
        """Return the project and those above it, to the top of the tree."""
        return self._node(project).views

    def has_children(self, project: str) -> bool:
        return self._node(project).has_children

    def _add(self, project: str, milligpus: int, millicpus: int) -> None:
        node = self._node(project)
        gpus, cpus = node.direct
        node.direct = DeviceAmount(gpus + milligpus, cpus + millicpus)
        for above in node.ancestry:
            gpus, cpus = above.held
            above.held = DeviceAmount(gpus + milligpus, cpus + millicpus)

    def _node(self, project: str) -> _ProjectNode:
        node = self._nodes.get(project)
        return node if node is not None else self._plant(project, {})

    def _plant(
        self, name: str, views: dict[str, ProjectInfo], below: frozenset[str] = frozenset()
    ) -> _ProjectNode:
        """Put it in its place, below its parents, unless it is there already."""
        if name in below:
            raise Bug(f"project `{name}` is above itself in the tree", circle=sorted(below))
        if name not in self._nodes:
            view = views.get(name) or ProjectInfo(name=name)
            parent = self._plant(view.parent, views, below | {name}) if view.parent is not None else None
            self._nodes[name] = _ProjectNode(view, parent)
        return self._nodes[name]


def _bounds(view: ProjectInfo) -> tuple[_Bounds, _Bounds]:
    limit, quota, borrow = view.limit or NO_DEVICES, view.quota or NO_DEVICES, view.borrow or NO_DEVICES
    return (
        _Bounds(_milli(limit.gpus), _milli(quota.gpus), _milli(borrow.gpus)),
        _Bounds(_milli(limit.cpus), _milli(quota.cpus), _milli(borrow.cpus)),
    )


def _milli(devices: float | None) -> int | None:
    return None if devices is None else millicpus_available(devices)


def _ceiling(limit: int | None, quota: int | None, borrow: int | None) -> float:
    borrowed = inf if quota is None or borrow is None else quota + borrow
    return borrowed if limit is None else min(limit, borrowed)


def _quota_refusal(
    project: str, node: _ProjectNode, device: DeviceKind, requested: int, in_use: int
) -> QuotaRefusal:
    bounds = node.gpus if device is DeviceKind.GPUS else node.cpus
    return QuotaRefusal(
        project=project,
        by=node.view.name,
        device=device,
        requested=requested,
        in_use=in_use,
        limit=bounds.limit,
        quota=bounds.quota,
        borrow=bounds.borrow,
    )
