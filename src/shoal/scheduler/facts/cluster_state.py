"""The facts that a plan is made from, updated one by one: nodes, holdings, waiting candidates.

Nothing here depends on the order in which the facts arrived: a state that was filled from a snapshot answers
like one that followed every change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from math import inf

import msgspec

from shoal.model.attempt import Allocation, NodeTask
from shoal.model.job import ResourceRequest
from shoal.scheduler.facts.amounts import (
    MILLI,
    Demand,
    DeviceAmount,
    Need,
    held_devices,
    minimum_devices,
    whole_node_devices,
)
from shoal.scheduler.facts.capacity import Capacity
from shoal.scheduler.facts.policy import Policy
from shoal.scheduler.facts.snapshot import Candidate, Holding, NodeInfo
from shoal.scheduler.order.fair_share import FairShare
from shoal.scheduler.order.project_tree import ProjectTree, QuotaRefusal
from shoal.scheduler.order.queue import CandidateQueue, LaneKey, QueueLane, QueuePosition
from shoal.scheduler.placement.earliest import EarliestStarts
from shoal.scheduler.placement.feasibility import Feasibility, WholeNodeQuota
from shoal.scheduler.placement.fit import NodeFinders, fits
from shoal.scheduler.placement.power import RackPower, choose_within_power
from shoal.scheduler.placement.windows import WindowSchedule
from shoal.scheduler.preemption.costs import PreemptionCosts

LaneRank = tuple[float, ...]
"""Priority, whether only borrowed devices are left, and standing. The least comes first."""
ANY_GPU, ANY_CPU = DeviceAmount(MILLI, 0), DeviceAmount(0, MILLI)


class ClusterState:
    """The facts and the indexes over them. Every change passes through here, so all indexes agree."""

    def __init__(self, policy: Policy) -> None:
        self.tree = ProjectTree()
        self.fair = FairShare(self.tree, policy.half_life_s)
        self._power = RackPower(policy.power_caps)
        self.has_caps = self._power.has_caps
        """Whether any rack has a power cap. If none has, power never matters."""
        self._power_as_of = -1
        self.windows = WindowSchedule(self.tree)
        self.capacity = Capacity()
        self.finders = NodeFinders(self.capacity)
        self.earliest_starts = EarliestStarts(self.capacity)
        self.queue = CandidateQueue(self.capacity.shape_counts)
        self.preemption_costs = PreemptionCosts(policy.max_evictions)
        self.elastic: set[str] = set()
        """Attempts that could use more nodes than they hold."""
        self.holdings: dict[str, Holding] = {}
        self.deferred: dict[str, Candidate] = {}
        """Candidates that wait for a dependency or a time, not for resources."""
        self.unconfirmed: dict[str, Candidate] = {}
        """Candidates that a plan started and that the caller has not confirmed."""
        self.losses: dict[str, str] = {}
        """By attempt, the node whose task is lost. The next plan decides all of them."""
        self.moves: dict[str, tuple[Holding, NodeTask]] = {}
        """By attempt: a holding as it was before a plan moved its lost task, and that task, until the caller
        confirms the move."""
        self._num_of_array: Counter[str] = Counter()
        self._standings: dict[str, LaneRank] = {}
        self._feasibility = Feasibility(self.capacity)
        self._feasibility_as_of = 0

    @property
    def feasibility(self) -> Feasibility:
        """Answers about empty nodes. Rebuilt whenever a node has changed."""
        if self._feasibility_as_of != self.capacity.num_node_changes:
            self._feasibility = Feasibility(self.capacity)
            self._feasibility_as_of = self.capacity.num_node_changes
        return self._feasibility

    def set_node(self, view: NodeInfo) -> bool:
        """Return whether anything changed."""
        node = self.capacity.nodes.get(view.name)
        if node is not None and node.view == view:
            return False
        self.capacity.set_node(view)
        return True

    @property
    def power(self) -> RackPower:
        """The power of capped racks. Rebuilt whenever a node has changed."""
        if self.has_caps and self._power_as_of != self.capacity.num_node_changes:
            views = (node.view for node in self.capacity.nodes.values())
            self._power.rebuild(views, self.holdings.values())
            self._power_as_of = self.capacity.num_node_changes
        return self._power

    def has_power_for(self, demand: Demand) -> bool:
        """Whether the racks of the open nodes could supply the demand while nothing else runs."""
        if not self.has_caps:
            return True
        power = self.power
        names = [node.name for node in self.feasibility.suitable(demand.need).without(demand.excluded).open]
        left = power.left_when_idle()
        return bool(choose_within_power(demand, names, self.capacity.nodes, power, left))

    def refusal(self, project: str, demand: Demand) -> QuotaRefusal | None:
        """Return which project up the tree refuses the least that the demand can start with."""
        if not self.tree.has_ceilings:
            return None
        if demand.need.is_exclusive:
            return self._whole_nodes(project, demand).refusal()
        return self.tree.refusal(project, self.required_devices(demand))

    def required_devices(self, demand: Demand) -> DeviceAmount:
        """Return the least that it takes. If it takes whole nodes and these differ, count the largest."""
        amount = minimum_devices(demand)
        if demand.need.is_exclusive:
            nodes = self.feasibility.suitable(demand.need).without(demand.excluded).nodes
            whole_amounts = [
                whole_node_devices(whole, demand.min_nodes) for whole in {node.whole for node in nodes}
            ]
            return DeviceAmount(*(max(amounts) for amounts in zip(amount, *whole_amounts, strict=True)))
        if demand.need.memory_bytes is not None and not demand.need.num_gpus:
            charged = self._least_charged(demand.need) * demand.min_nodes
            amount = amount._replace(millicpus=max(amount.millicpus, charged))
        return amount

    def _least_charged(self, need: Need) -> int:
        """Return the CPUs that its memory is charged for, on the node where that is least."""
        wholes = (whole for whole in self.capacity.nodes_by_size if fits(need, whole, whole))
        return min((need.charged_on(whole) for whole in wholes), default=0)

    def allowed(self, project: str, demand: Demand) -> Demand:
        """Return the demand as its project may have it: without whole nodes that have more than the project
        may hold.
        """
        if not demand.need.is_exclusive or not self.tree.has_ceilings:
            return demand
        return self._whole_nodes(project, demand).allowed()

    def _whole_nodes(self, project: str, demand: Demand) -> WholeNodeQuota:
        return WholeNodeQuota(self.tree, project, demand, self.feasibility.suitable(demand.need))

    def num_of_array(self, array_id: str | None) -> int:
        return self._num_of_array[array_id] if array_id is not None else 0

    def start(self, attempt_id: str, allocation: Allocation, now: float) -> None:
        """The attempt leaves the queue and holds its allocation."""
        candidate = self.unconfirmed[attempt_id] = self.queue.remove(attempt_id)
        self._take(holding_of(candidate, allocation, now), is_new=True)

    def undo(self, attempt_id: str) -> Candidate | None:
        """Return the candidate whose start was not carried out; None if `start` was not called for it."""
        candidate = self.unconfirmed.pop(attempt_id, None)
        if candidate is not None:
            self._give(attempt_id, self.holdings[attempt_id].placed_at, is_new=True)
        return candidate

    def losses_in_order(self, now: float) -> list[tuple[Holding, ResourceRequest, NodeTask]]:
        """Return the lost tasks in the order of their replacement: by priority and project standing, as
        waiting candidates, then the attempt that has run longest.
        """
        lost = [
            (holding, holding.request, task)
            for attempt_id, node in self.losses.items()
            if (holding := self.holdings.get(attempt_id)) is not None and holding.request is not None
            for task in holding.allocation
            if task.node == node
        ]
        return sorted(lost, key=lambda loss: self._loss_order(loss[0], now))

    def _loss_order(self, holding: Holding, now: float) -> tuple[int, LaneRank, float, str]:
        standing = self._standing(holding.project, now)
        return -holding.priority, standing, holding.placed_at, holding.attempt_id

    @contextmanager
    def without_task(self, holding: Holding, task: NodeTask) -> Iterator[None]:
        """Count the project's devices and the rack's power without one task of the holding. What it has of
        its node stays taken.
        """
        held, power = held_devices((task,)), self.power
        others = tuple(other for other in holding.allocation if other != task)
        rest = msgspec.structs.replace(holding, allocation=others)
        self.tree.give(holding.project, held)
        power.give(holding)
        power.take(rest)
        try:
            yield
        finally:
            self.tree.take(holding.project, held)
            power.give(rest)
            power.take(holding)

    def move(self, holding: Holding, lost: NodeTask, task: NodeTask) -> None:
        """`task` takes the place of a lost one.

        What the lost task has of its node stays taken until the caller confirms the move: the caller may find
        that the node has spoken again, and another job must not have started there in the same plan.
        """
        tasks = tuple(task if other == lost else other for other in holding.allocation)
        self.moves[holding.attempt_id] = holding, lost
        self._give(holding.attempt_id, holding.placed_at)
        self._take(msgspec.structs.replace(holding, allocation=tasks))
        self.capacity.take(lost, inf)

    def undo_move(self, attempt_id: str) -> bool:
        """Return whether a move was planned for the attempt and not confirmed."""
        holding = self._settle_move(attempt_id)
        if holding is not None:
            self._give(attempt_id, holding.placed_at)
            self._take(holding)
        return holding is not None

    def _settle_move(self, attempt_id: str) -> Holding | None:
        """Give back what a moved task had of its lost node. Return the holding before the move."""
        if attempt_id not in self.moves:
            return None
        holding, lost = self.moves.pop(attempt_id)
        self.capacity.give(lost, inf)
        return holding

    def hold(self, holding: Holding) -> bool:
        """Return whether anything was released."""
        was_moved = self._settle_move(holding.attempt_id) is not None
        return self._hold(holding) or was_moved

    def _hold(self, holding: Holding) -> bool:
        self.unconfirmed.pop(holding.attempt_id, None)
        previous = self.holdings.get(holding.attempt_id)
        if previous is not None and holding.checkpoint_at is None:
            holding = msgspec.structs.replace(holding, checkpoint_at=previous.checkpoint_at)
        if previous == holding:
            return False
        if (
            previous is not None
            and previous.allocation == holding.allocation
            and previous.array_id == holding.array_id
        ):
            self.preemption_costs.remove(previous)
            self.preemption_costs.add(holding)
            if msgspec.structs.replace(previous, checkpoint_at=holding.checkpoint_at) == holding:
                self.holdings[holding.attempt_id] = holding
                return False  # a checkpoint decides which attempt is evicted, never whether any is
            self.capacity.retime(holding, previous)
            if self.has_caps:
                self._power.give(previous)
                self._power.take(holding)
            held = held_devices(holding.allocation)
            self.fair.release(previous.project, held, previous.placed_at)
            self.fair.hold(holding.project, held, holding.placed_at)
            self.holdings[holding.attempt_id] = holding
            return True
        if previous is not None:
            self._give(holding.attempt_id, holding.placed_at)
        self._take(holding)
        return previous is not None

    def save(self, attempt_id: str, at: float | None) -> bool:
        """The attempt has a checkpoint of that time; None: it has no known one.

        Later calls of `hold` without a checkpoint keep the one that is known here.
        """
        holding = self.holdings.get(attempt_id)
        if holding is None:
            return False
        self.preemption_costs.remove(holding)
        updated = self.holdings[attempt_id] = msgspec.structs.replace(holding, checkpoint_at=at)
        self.preemption_costs.add(updated)
        return True

    def release(self, attempt_id: str, at: float) -> bool:
        """Return whether it held anything."""
        self.unconfirmed.pop(attempt_id, None)
        if attempt_id not in self.holdings:
            return False
        self._settle_move(attempt_id)
        self._give(attempt_id, at)
        return True

    def drop(self, attempt_id: str) -> bool:
        """Return whether it waited for resources. A deferred candidate was in no other job's way."""
        self.deferred.pop(attempt_id, None)
        if attempt_id not in self.queue.candidates:
            return False
        self.queue.remove(attempt_id)
        return True

    def ranked_lanes(self, now: float) -> list[list[QueueLane]]:
        """Return the lanes, those of equal rank together, the first to be served first."""
        if len(self.queue.lanes) == 1:
            (lane,) = self.queue.lanes.values()
            self._standings = {lane.key.project: ()}
            return [[lane]]
        projects = self._projects()
        if len(projects) == 1:
            self._standings = dict.fromkeys(projects, ())
        else:
            self._standings = {project: self._standing(project, now) for project in projects}
        lanes = sorted(self.queue.lanes.values(), key=lambda lane: (self.rank(lane.key), lane.key))
        return [list(equal) for _, equal in groupby(lanes, key=lambda lane: self.rank(lane.key))]

    @property
    def has_rivals(self) -> bool:
        """Whether usage can affect the order of candidates: jobs of several projects or queues wait, or
        several projects have lost tasks.

        Several queues of one project count too. If the clock was set back, a start shows in the project's
        usage at once, and the rest of that queue then comes after another queue.
        """
        holdings = [self.holdings[attempt_id] for attempt_id in self.losses if attempt_id in self.holdings]
        num_losing = len({holding.project for holding in holdings})
        return num_losing > 1 or len({(key.project, key.queue) for key in self.queue.lanes}) > 1

    def is_order_unchanged(self, now: float) -> bool:
        """Whether the waiting projects are in the same order as when `ranked_lanes` was called."""
        projects = self._projects()
        if len(projects) <= 1 and projects <= self._standings.keys():
            return True
        standings = {project: self._standing(project, now) for project in projects}
        return standings.keys() <= self._standings.keys() and _order(standings) == _order(
            {project: self._standings[project] for project in standings}
        )

    def rank(self, key: LaneKey) -> LaneRank:
        return (-key.priority, *self._standings[key.project])

    def _projects(self) -> set[str]:
        return {key.project for key in self.queue.lanes}

    def _standing(self, project: str, now: float) -> LaneRank:
        is_guaranteed = any(self.tree.is_within_quota(project, device) for device in (ANY_GPU, ANY_CPU))
        return (0.0 if is_guaranteed else 1.0, *self.fair.standing(project, now))

    def queue_position(self, candidate: Candidate) -> tuple[LaneRank, QueuePosition]:
        """Return its place in the order of heads."""
        return self.rank(LaneKey.of(candidate)), self.queue.position_of(candidate)

    def _take(self, holding: Holding, *, is_new: bool = False) -> None:
        self.holdings[holding.attempt_id] = holding
        self.preemption_costs.add(holding)
        if holding.request is not None and len(holding.allocation) < holding.request.max_nodes:
            self.elastic.add(holding.attempt_id)
        self.capacity.hold(holding)
        held = held_devices(holding.allocation)
        self.tree.take(holding.project, held)
        self.fair.hold(holding.project, held, holding.placed_at, is_new=is_new)
        if self.has_caps:
            self._power.take(holding)
        if holding.array_id is not None:
            self._num_of_array[holding.array_id] += 1

    def _give(self, attempt_id: str, at: float, *, is_new: bool = False) -> None:
        holding = self.holdings.pop(attempt_id)
        self.preemption_costs.remove(holding)
        self.elastic.discard(attempt_id)
        self.capacity.release(holding)
        held = held_devices(holding.allocation)
        self.tree.give(holding.project, held)
        self.fair.release(holding.project, held, at, is_new=is_new)
        if self.has_caps:
            self._power.give(holding)
        if holding.array_id is not None:
            self._num_of_array[holding.array_id] -= 1
            if not self._num_of_array[holding.array_id]:
                del self._num_of_array[holding.array_id]


def _order(standings: dict[str, LaneRank]) -> list[list[str]]:
    """Return the projects in the order of their standing, equal ones together."""
    by_rank: dict[LaneRank, list[str]] = {}
    for project, rank in standings.items():
        by_rank.setdefault(rank, []).append(project)
    return [sorted(by_rank[rank]) for rank in sorted(by_rank)]


def holding_of(candidate: Candidate, allocation: Allocation, now: float) -> Holding:
    """Return what a candidate holds once it has started."""
    return Holding(
        attempt_id=candidate.attempt_id,
        job_id=candidate.job_id,
        project=candidate.project,
        priority=candidate.priority,
        allocation=allocation,
        placed_at=now,
        time_limit_s=candidate.request.time_limit_s,
        array_id=candidate.array_id,
        label=candidate.label,
        owner=candidate.owner,
        name=candidate.name,
        request=candidate.request,
        excluded_nodes=candidate.excluded_nodes,
        avoided_nodes=candidate.avoided_nodes,
        num_evicted=candidate.num_evicted,
    )
