"""What it costs to stop a running job: the work since its last durable checkpoint, and the restart.

There are two figures. An eviction's bill states the most that is lost, never less: if no checkpoint is known,
the whole run. Victims are chosen by the expected loss instead. For a job without a known checkpoint it is
what the median of the jobs with one would lose, because it may well save where Shoal does not see it, and
never more than its whole run. What a job saves between the signal and its end makes the real loss smaller
than both.

`PreemptionCosts` indexes running attempts by what stopping them costs, so that finding the cheapest does not
grow with the cluster. Seconds lost grow alike for every attempt as time passes, so an order made once stays
correct. That is also true of the median, by which attempts without known checkpoints count. Most clusters
evict nothing for days. So a new attempt enters the index only when the index is read, and an attempt that has
ended by then never enters it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping
from heapq import merge, nsmallest
from math import inf
from typing import NamedTuple

from shoal.model.attempt import NodeTask
from shoal.scheduler.facts.amounts import DeviceAmount, Need, held_devices, millicpus_needed
from shoal.scheduler.facts.snapshot import Holding
from shoal.scheduler.order.fair_share import CPUS_PER_GPU, gpu_equivalents

RESTART_S = 120.0
"""Seconds until a stopped job is back at its checkpoint: stopping it, starting it, reading the checkpoint."""
NO_CHECKPOINTS = -inf
"""No attempt has a known checkpoint: no work counts as safe."""


def safe_until(holding: Holding) -> float:
    """Return until when its work certainly survives a stop. What earlier attempts saved is where this one
    began.
    """
    return max(holding.checkpoint_at or holding.placed_at, holding.placed_at)


def likely_until(holding: Holding, median_safe_until: float) -> float:
    """Return until when its work is expected to survive. `median_safe_until`: of the attempts with known
    checkpoints.
    """
    return (
        safe_until(holding)
        if holding.checkpoint_at is not None
        else max(holding.placed_at, median_safe_until)
    )


def lost_s(holding: Holding, now: float, median_safe_until: float = NO_CHECKPOINTS) -> float:
    """Return the seconds of its run that are repeated, including the restart: at most, or as expected by the
    median.
    """
    return max(now - likely_until(holding, median_safe_until), 0.0) + RESTART_S


def lost_device_s(holding: Holding, now: float, median_safe_until: float = NO_CHECKPOINTS) -> float:
    """Return device-seconds lost. CPUs count as parts of a GPU. Zero for an attempt that is
    stopping anyway.
    """
    if holding.is_stopping:
        return 0.0
    return lost_s(holding, now, median_safe_until) * gpu_equivalents(held_devices(holding.allocation))


class PriorityGroup(NamedTuple):
    """Attempts for which the same eviction rights hold, and that hold the same."""

    priority: int
    project: str
    num_nodes: int
    on_first_node: DeviceAmount
    has_checkpoint: bool
    """Whether they have known checkpoints."""

    @classmethod
    def of(cls, holding: Holding) -> PriorityGroup:
        first = holding.allocation[0]
        on_first = DeviceAmount(
            len(first.gpu_ids) * first.gpu_milli, 0 if first.gpu_ids else millicpus_needed(first.cpus)
        )
        is_known = holding.checkpoint_at is not None
        return cls(holding.priority, holding.project, len(holding.allocation), on_first, is_known)

    def waste(self, need: Need) -> float:
        """Return how many devices stop for each device that a node with this need has use for."""
        held = gpu_equivalents(self.on_first_node)
        needed = gpu_equivalents(DeviceAmount(need.num_gpus * need.gpu_milli, need.millicpus))
        return self.num_nodes * held / max(min(held, needed), 1e-6)


class _NodeWeight:
    """Sums over all attempts on a node: devices, and devices multiplied by the times until which their work
    is safe. Integers, so that removing everything leaves exactly zero.
    """

    __slots__ = ("saved", "saved_safe", "unsaved", "unsaved_safe")

    def __init__(self) -> None:
        self.saved = self.saved_safe = self.unsaved = self.unsaved_safe = 0

    def add(self, amount: int, safe: int, *, has_checkpoint: bool) -> None:
        if has_checkpoint:
            self.saved += amount
            self.saved_safe += safe
        else:
            self.unsaved += amount
            self.unsaved_safe += safe

    @property
    def is_nothing(self) -> bool:
        """Whether no attempt is left that would lose anything."""
        return not self.saved and not self.unsaved

    def loss(self, now: float, median_safe_until: float) -> float:
        """Return the loss if all of them stop. It only sorts nodes; its unit has no meaning."""
        whole_runs = 1000 * now * self.unsaved - self.unsaved_safe
        unsaved_loss = (
            whole_runs
            if median_safe_until == NO_CHECKPOINTS
            else min(whole_runs, 1000 * (now - median_safe_until) * self.unsaved)
        )
        restarts = 1000 * RESTART_S * (self.saved + self.unsaved)
        return 1000 * now * self.saved - self.saved_safe + unsaved_loss + restarts


ProjectPriority = tuple[int, str]
"""A priority and a project: eviction rights depend on nothing else."""


class PreemptionCosts:
    def __init__(self, max_evictions: int) -> None:
        self._max_evictions = max_evictions
        self._pending: dict[str, Holding] = {}
        """Attempts that were added since the index was last read."""
        self._on_node: dict[str, dict[str, NodeTask]] = {}
        self.stopping: dict[str, Holding] = {}
        """Attempts that were already asked to stop. What they hold is free soon."""
        self._group_of: dict[str, PriorityGroup] = {}
        self._eviction_exhausted: dict[str, Holding] = {}
        self._devices_of: dict[str, float] = {}
        self._priority_groups: dict[PriorityGroup, list[tuple[float, str]]] = {}
        """Attempts of `group_of`. The one that saved last is first."""
        self._held: dict[ProjectPriority, dict[str, tuple[int, int]]] = {}
        """By project and priority: for each node, the thousandths of CPUs and the GPUs that these attempts
        hold there."""
        self._saves: list[float] = []
        """Until when the work is safe of attempts that are not stopping and have known checkpoints;
        sorted."""
        self._weights: dict[str, _NodeWeight] = {}
        """By node, the sums over all attempts that are not stopping."""

    @property
    def on_node(self) -> Mapping[str, Mapping[str, NodeTask]]:
        """By node, what each attempt holds there."""
        self._catch_up()
        return self._on_node

    @property
    def group_of(self) -> Mapping[str, PriorityGroup]:
        """The groups of all attempts that are not stopping and were evicted less often than the policy
        allows.
        """
        self._catch_up()
        return self._group_of

    @property
    def eviction_exhausted(self) -> Mapping[str, Holding]:
        """Attempts that were evicted as often as the policy allows."""
        self._catch_up()
        return self._eviction_exhausted

    @property
    def devices_of(self) -> Mapping[str, float]:
        """What each attempt of `group_of` holds. CPUs count as parts of a GPU."""
        self._catch_up()
        return self._devices_of

    @property
    def priority_groups(self) -> Collection[PriorityGroup]:
        self._catch_up()
        return self._priority_groups.keys()

    @property
    def median_safe_until(self) -> float:
        """Until when the work of an attempt without a known checkpoint is expected to be safe.

        It is the median of the attempts with one. Of an even number, it is the one of the two in the middle
        that loses more.
        """
        self._catch_up()
        return self._saves[(len(self._saves) - 1) // 2] if self._saves else NO_CHECKPOINTS

    def add(self, holding: Holding) -> None:
        self._pending[holding.attempt_id] = holding
        if holding.is_stopping:
            self.stopping[holding.attempt_id] = holding

    def remove(self, holding: Holding) -> None:
        """Remove it as it was added."""
        self.stopping.pop(holding.attempt_id, None)
        if self._pending.pop(holding.attempt_id, None) is None:
            self._remove_entry(holding)

    def _catch_up(self) -> None:
        if self._pending:
            pending, self._pending = self._pending, {}
            for holding in pending.values():
                self._enter(holding)

    def _enter(self, holding: Holding) -> None:
        for task in holding.allocation:
            self._on_node.setdefault(task.node, {})[holding.attempt_id] = task
        if holding.is_stopping:
            return
        if holding.checkpoint_at is not None:
            insort(self._saves, safe_until(holding))
        held = held_devices(holding.allocation)
        if holding.num_evicted < self._max_evictions:
            group = self._group_of[holding.attempt_id] = PriorityGroup.of(holding)
            insort(self._priority_groups.setdefault(group, []), _cost_key(holding))
            self._devices_of[holding.attempt_id] = gpu_equivalents(held)
            self._count(holding, 1)
        else:
            self._eviction_exhausted[holding.attempt_id] = holding
        self._weigh(holding, held, 1)

    def _remove_entry(self, holding: Holding) -> None:
        for task in holding.allocation:
            on_node = self._on_node.get(task.node, {})
            on_node.pop(holding.attempt_id, None)
            if not on_node:
                self._on_node.pop(task.node, None)
        if holding.is_stopping:
            return
        if holding.checkpoint_at is not None:
            del self._saves[bisect_left(self._saves, safe_until(holding))]
        self._eviction_exhausted.pop(holding.attempt_id, None)
        self._leave_group(holding)
        self._weigh(holding, held_devices(holding.allocation), -1)

    def cheapest(self, groups: Collection[PriorityGroup], need: Need, now: float) -> Iterator[str]:
        """Yield attempts of those groups, by their loss per device that `need` has use for."""
        self._catch_up()
        ways = [self._by_loss(group, group.waste(need), now) for group in sorted(groups)]
        return (attempt_id for _, attempt_id in merge(*ways))

    def cheapest_nodes(self, count: int, now: float) -> list[str]:
        """Return the nodes that lose least if all their attempts stop except those that are stopping anyway;
        the cheapest first.
        """
        median_safe_until = self.median_safe_until
        losses = ((weight.loss(now, median_safe_until), name) for name, weight in self._weights.items())
        return [name for _, name in nsmallest(count, losses)]

    def loss_on(self, name: str, now: float) -> float:
        """Return the key that sorts a node among the cheapest."""
        self._catch_up()
        weight = self._weights.get(name)
        return 0.0 if weight is None else weight.loss(now, self.median_safe_until)

    def held_on(self, groups: Collection[PriorityGroup]) -> Iterator[tuple[str, int, int]]:
        """Yield nodes, with the thousandths of CPUs and GPUs that attempts of the groups' projects and
        priorities hold there.
        """
        self._catch_up()
        project_priorities = sorted({(group.priority, group.project) for group in groups})
        if len(project_priorities) == 1:
            return ((name, *held) for name, held in self._held[project_priorities[0]].items())
        total: dict[str, tuple[int, int]] = {}
        for project_priority in project_priorities:
            for name, (cpus, gpus) in self._held[project_priority].items():
                so_far = total.get(name, (0, 0))
                total[name] = so_far[0] + cpus, so_far[1] + gpus
        return ((name, *held) for name, held in total.items())

    def _count(self, holding: Holding, sign: int) -> None:
        project_priority = holding.priority, holding.project
        held_by_node = self._held.setdefault(project_priority, {})
        for task in holding.allocation:
            cpus, gpus = held_by_node.get(task.node, (0, 0))
            cpus += sign * millicpus_needed(task.cpus)
            gpus += sign * len(task.gpu_ids)
            if cpus or gpus:
                held_by_node[task.node] = cpus, gpus
            else:
                del held_by_node[task.node]
        if not held_by_node:
            del self._held[project_priority]

    def _weigh(self, holding: Holding, held: DeviceAmount, sign: int) -> None:
        amount = sign * (held.milligpus * int(CPUS_PER_GPU) + held.millicpus)
        safe, is_known = amount * round(safe_until(holding) * 1000), holding.checkpoint_at is not None
        for task in holding.allocation:
            weight = self._weights.get(task.node)
            if weight is None:
                weight = self._weights[task.node] = _NodeWeight()
            weight.add(amount, safe, has_checkpoint=is_known)
            if weight.is_nothing:
                del self._weights[task.node]

    def _leave_group(self, holding: Holding) -> None:
        group = self._group_of.pop(holding.attempt_id, None)
        if group is None:
            return
        del self._devices_of[holding.attempt_id]
        self._count(holding, -1)
        equals = self._priority_groups[group]
        del equals[bisect_left(equals, _cost_key(holding))]
        if not equals:
            del self._priority_groups[group]

    def _by_loss(self, group: PriorityGroup, waste: float, now: float) -> Iterator[tuple[float, str]]:
        median_safe_until = NO_CHECKPOINTS if group.has_checkpoint else self.median_safe_until
        return (
            ((max(now - max(-since, median_safe_until), 0.0) + RESTART_S) * waste, attempt_id)
            for since, attempt_id in self._priority_groups[group]
        )


def _cost_key(holding: Holding) -> tuple[float, str]:
    return -safe_until(holding), holding.attempt_id
