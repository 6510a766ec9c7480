"""Free capacity for jobs that may evict others, by stopping the attempts that lose the least, and no more
than needed.

A `Preemption` lives as long as one cycle. Jobs for which capacity was freed earlier in the cycle count as
started, and their victims as gone. So no quota is exceeded, and no project loses more than it borrowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from itertools import repeat
from math import inf
from typing import NamedTuple

from shoal.scheduler.facts.amounts import Demand, DeviceAmount, Need, NodeResources, held_devices
from shoal.scheduler.facts.cluster_state import ClusterState
from shoal.scheduler.facts.plan import Eviction, EvictionGround
from shoal.scheduler.facts.policy import Policy
from shoal.scheduler.facts.snapshot import Candidate, Holding
from shoal.scheduler.order.queue import LaneKey
from shoal.scheduler.placement.power import RackMilliwatts
from shoal.scheduler.placement.reservations import PowerDraw
from shoal.scheduler.preemption.costs import lost_device_s, lost_s
from shoal.scheduler.preemption.options import PreemptionOptions
from shoal.scheduler.preemption.rights import PreemptionPlan, can_preempt
from shoal.scheduler.preemption.victims import VictimSearch, VictimSet

MAX_ROOMS = 16
"""Jobs for which others are stopping at the same time. More jobs wait until those have started."""

MAX_TRIES = 8
"""How often other nodes are tried if the cheapest ones have no power."""


class Room(NamedTuple):
    """Nodes that hold a job once all attempts in `stopping` have stopped, and what they have to
    spare then.
    """

    spare: dict[str, NodeResources]
    stopping: tuple[str, ...]
    draw: PowerDraw | None
    """Set if racks have caps."""


class Preemption:
    def __init__(self, state: ClusterState, policy: Policy, now: float) -> None:
        self._state = state
        self._policy = policy
        self._now = now
        self._gone: dict[str, Holding] = dict(state.preemption_costs.stopping)
        self._served: list[tuple[str, DeviceAmount]] = []
        self._reserved: dict[str, list[Need]] = {}
        """By node, the needs for which capacity was freed."""
        self.evictions: list[Eviction] = []
        self.settles_at = inf
        """When the first attempt may be evicted that was passed over because it had just started."""

    @property
    def nodes(self) -> AbstractSet[str]:
        """Nodes on which capacity is being freed."""
        return self._reserved.keys()

    @property
    def is_exhausted(self) -> bool:
        return len(self._served) >= MAX_ROOMS

    def may_serve(self, key: LaneKey) -> bool:
        """Whether any job of the lane may be privileged. Cheap, because most clusters have no privileged
        jobs.
        """
        return can_preempt(key.priority, self._policy) or self._state.tree.has_quota(key.project)

    def is_privileged(self, candidate: Candidate, amount: DeviceAmount) -> bool:
        """Whether it may evict any job at all, judged by its own class and quota alone."""
        return can_preempt(candidate.priority, self._policy) or self._state.tree.is_within_quota(
            candidate.project, amount
        )

    def allows(self, project: str, amount: DeviceAmount) -> bool:
        """Whether a start of `amount` leaves the jobs that others stop for what their projects may hold."""
        if not self._served or not self._state.tree.has_ceilings:
            return True
        with self._as_if_done():
            return self._state.tree.refusal(project, amount) is None

    def make_room(
        self, head: Candidate, demand: Demand, barred: AbstractSet[str], reserved_power: RackMilliwatts
    ) -> Room | None:
        """Return the cheapest room for it outside `barred` and beside the power that is reserved for others.

        None: the attempts that it may evict are not enough. No job is evicted for power alone.
        """
        if self.is_exhausted:
            return None
        for _ in repeat(None, MAX_TRIES):
            victim_set, preemption_plan = self._search(head, demand, barred)
            if victim_set is None:
                return None
            draw, beyond = self._draw(victim_set, demand, reserved_power)
            if not beyond:
                return self._make(head, demand, victim_set, preemption_plan, draw)
            barred = barred | beyond
        return None

    def _search(
        self, head: Candidate, demand: Demand, barred: AbstractSet[str]
    ) -> tuple[VictimSet | None, PreemptionPlan]:
        state, victim_set = self._state, None
        with self._as_if_done():
            demand = state.allowed(head.project, demand)
            preemption_plan = PreemptionPlan(head, state.required_devices(demand), state.tree, self._policy)
            for groups in preemption_plan.group_choices(state.preemption_costs.priority_groups):
                if victim_set is None and (groups or self._gone):
                    options = PreemptionOptions(
                        state,
                        demand,
                        groups,
                        barred,
                        self._gone,
                        self._reserved,
                        self._now,
                        self._policy.settle_s,
                    )
                    with preemption_plan.undone():
                        victim_set = VictimSearch(options).run(preemption_plan)
                    self.settles_at = min(self.settles_at, options.settles_at)
        return victim_set, preemption_plan

    def _make(
        self,
        head: Candidate,
        demand: Demand,
        victim_set: VictimSet,
        preemption_plan: PreemptionPlan,
        draw: PowerDraw | None,
    ) -> Room:
        for holding in victim_set.victims:
            self.evictions.append(self._eviction(head, holding, preemption_plan.grounds[holding.attempt_id]))
            self._gone[holding.attempt_id] = holding
        self._served.append((head.project, preemption_plan.amount))
        for name in victim_set.spare:
            self._reserved.setdefault(name, []).append(demand.need)
        return Room(victim_set.spare, victim_set.stopping, draw)

    def _draw(
        self, victim_set: VictimSet, demand: Demand, reserved_power: RackMilliwatts
    ) -> tuple[PowerDraw | None, frozenset[str]]:
        """Return the power it takes and leaves once all stopping attempts are gone, and the nodes of racks
        with too little power, except for as many of the chosen nodes as the rack can supply.
        """
        power = self._state.power
        if not power.has_caps:
            return None, frozenset()
        gone = {holding.attempt_id: holding for holding in (*self._gone.values(), *victim_set.victims)}
        back = power.of_tasks(task for holding in gone.values() for task in holding.allocation)
        left = {rack: left + back[rack] - reserved_power.get(rack, 0) for rack, left in power.left().items()}
        supplied = power.within(victim_set.spare, demand.need, left)
        short = {power.racks[name] for name in victim_set.spare if name not in supplied}
        beyond = frozenset(
            name for name, rack in power.racks.items() if rack in short and name not in supplied
        )
        watts = power.of_nodes(demand.need, victim_set.spare)
        return PowerDraw(watts, {rack: left[rack] - watts[rack] for rack in watts}), beyond

    def _eviction(self, head: Candidate, holding: Holding, why: EvictionGround) -> Eviction:
        return Eviction(
            attempt_id=holding.attempt_id,
            for_attempt_id=head.attempt_id,
            ground=why,
            lost_s=lost_s(holding, self._now),
            lost_device_s=lost_device_s(holding, self._now),
            saved_at=holding.checkpoint_at,
            likely_device_s=lost_device_s(holding, self._now, self._state.preemption_costs.median_safe_until),
        )

    @contextmanager
    def _as_if_done(self) -> Iterator[None]:
        """Count projects as they will be once all victims have stopped and all served jobs have started."""
        tree = self._state.tree
        gone, served = list(self._gone.values()), list(self._served)
        for holding in gone:
            tree.give(holding.project, held_devices(holding.allocation))
        for project, amount in served:
            tree.take(project, amount)
        try:
            yield
        finally:
            for holding in gone:
                tree.take(holding.project, held_devices(holding.allocation))
            for project, amount in served:
                tree.give(project, amount)
