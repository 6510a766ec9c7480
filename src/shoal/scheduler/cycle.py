"""One pass over the waiting candidates: which start now, on which nodes, and which are promised a start.

First `replacements` finds other nodes for lost tasks, because the rest of their attempts stands idle.
The pass serves ranks in order, highest first. Within a rank it first serves the heads of each queue: due
candidates by arrival, then the others by score, up to the first that does not fit. That one is promised the
nodes that can serve it earliest. Then all other candidates start by score, if that delays no promise.

The result depends only on the facts in the cluster state and on `now`.
"""

from __future__ import annotations

from collections.abc import Collection
from heapq import heapify, heappop, heappush, heapreplace
from itertools import groupby
from math import inf

from shoal.scheduler.facts.amounts import Demand, minimum_devices, remaining_after
from shoal.scheduler.facts.cluster_state import ClusterState
from shoal.scheduler.facts.plan import PlannedStart, Promise
from shoal.scheduler.facts.policy import Policy
from shoal.scheduler.facts.snapshot import Candidate
from shoal.scheduler.order.queue import LaneKey, QueueLane, QueuePosition, ShapeGroup, key_by_score
from shoal.scheduler.placement.earliest import free_by
from shoal.scheduler.placement.power import FuturePower
from shoal.scheduler.placement.reservations import CapacityReservation, CapacityReservations, PowerDraw
from shoal.scheduler.placement.search import PlacementSearch
from shoal.scheduler.preemption.growth import reserve_for_growth
from shoal.scheduler.preemption.preempt import Preemption
from shoal.scheduler.preemption.rights import ReclaimOrder, reclaim_order
from shoal.scheduler.replacements import Replacements, replace_lost_tasks


class SchedulingCycle:
    """A start takes its resources in the cluster state at once, so the next question sees what is left."""

    def __init__(self, state: ClusterState, policy: Policy, now: float) -> None:
        self._state = state
        self._policy = policy
        self.now = now
        self.reservations = CapacityReservations(state.capacity, state.windows, state.power)
        self.heads: dict[str, Candidate] = {}
        """Per queue, the first candidate that could run on the open nodes and does not fit now."""
        self.replacements = Replacements([], {})
        self.starts: list[PlannedStart] = []
        self.preemption = Preemption(state, policy, now)
        self._search = PlacementSearch(state, self.reservations, self.preemption.allows)
        self._rooms: set[ShapeGroup] = set()
        """Groups whose first candidate has other attempts stop for it."""
        self._is_quota_unserved = False
        """A candidate within its quota found no attempts that it may evict. A candidate that starts now may
        borrow, and could then be evicted for it."""
        self.valid_until = inf
        """From then on another pass may differ although nothing has happened."""
        self.replan_at = inf
        """When such a pass may start a candidate."""

    def run(self) -> None:
        self._state.queue.advance_to(self.now)
        self._state.tree.clear_reserved()
        if self._state.losses:
            self.replacements = replace_lost_tasks(self._state, self._policy, self.now)
        self.replan_at = self._state.windows.next_change(self.now)
        self.valid_until = min(self._state.queue.next_due(), self.replan_at)
        for priority, ranks in groupby(
            self._state.ranked_lanes(self.now), key=lambda lanes: lanes[0].key.priority
        ):
            equal = list(ranks)
            self._reserve_for_growth(priority)
            self._serve_privileged([lane for lanes in equal for lane in lanes])
            for lanes in equal:
                self._reserve_quota(lanes)
                self._start_heads(lanes)
                self._start_shortest([group for lane in lanes for group in lane.groups.values()])
        self._reserve_for_growth(-inf)

    def run_newcomers(self, newcomers: Collection[Candidate], now: float) -> bool:
        """Consider newcomers alone, because nothing was released since `run`. False: only a complete cycle
        can tell.
        """
        self.now, state = now, self._state
        # Under a quota ceiling, each start uses up what others may have, and quota is reserved rank by rank.
        # Under a power cap, each start changes which nodes have power left for waiting candidates.
        if state.tree.has_ceilings or state.has_caps:
            return False
        if not state.is_order_unchanged(now) or not self._do_heads_wait_for_room():
            return False
        last = max(
            [state.rank(LaneKey.of(reservation.head)) for reservation in self.reservations.all], default=()
        )
        startable = []
        for candidate in newcomers:
            group = state.queue.group_of(candidate.attempt_id)
            rank, head = state.rank(group.lane.key), self.heads.get(candidate.queue)
            if head is None or (rank, state.queue.position_of(candidate)) < state.queue_position(head):
                return False
            if rank < last:
                return False  # a reservation for another queue's head does not bind this candidate
            if self.preemption.may_serve(group.lane.key) and self.preemption.is_privileged(
                candidate, minimum_devices(group.key.demand)
            ):
                return False
            startable.append((rank, key_by_score(candidate), group))
        for _, (*_, attempt_id), group in sorted(startable):
            self._start(group, attempt_id)
        return True

    def _do_heads_wait_for_room(self) -> bool:
        """Whether no head became unable to start because a later start filled the limit of its array. If one
        did, other candidates are heads.
        """
        for head in self.heads.values():
            group = self._state.queue.group_of(head.attempt_id)
            if group not in self._rooms and not self._waits_for_room(group):
                return False
        return True

    def promises(self) -> tuple[Promise, ...]:
        stopping = self._state.preemption_costs.stopping
        return tuple(
            [
                reservation.promise
                for reservation in self.reservations.all
                if reservation.head.attempt_id not in stopping
            ]
        )

    def _reserve_for_growth(self, least: float) -> None:
        """Reserve nodes for attempts of at least this priority that are stopping to restart on more nodes."""
        if reserve_for_growth(self._state, self.reservations, least, self.now):
            # A start before one of them, or on a node it could use, changes what is reserved for it.
            self.valid_until = self.now

    def _serve_privileged(self, lanes: list[QueueLane]) -> None:
        """Serve the first candidates of each lane that may evict others: each starts, or others stop for it.

        This comes before all other candidates of the priority, so that an evicted job does not take back what
        it released.
        """
        queue = [position for lane in lanes if (position := self._next_privileged(lane, 0)) is not None]
        heapify(queue)
        while queue:
            _, (_, (*_, attempt_id)), index, lane = heappop(queue)
            group = self._state.queue.group_of(attempt_id)
            if not self._start(group, attempt_id):
                if not self._is_possible(group) or not self._make_room(attempt_id, group):
                    continue
                index += 1
            following = self._next_privileged(lane, index)
            if following is not None:
                heappush(queue, following)

    def _next_privileged(
        self, lane: QueueLane, index: int
    ) -> tuple[ReclaimOrder, QueuePosition, int, QueueLane] | None:
        """Return the candidate at `index` if it may evict others; None if the lane has none there."""
        if not self.preemption.may_serve(lane.key):
            return None
        position, candidate_queue = self._state.queue.nth(lane, index), self._state.queue
        if position is None:
            return None
        attempt_id = position[1][-1]
        amount = minimum_devices(candidate_queue.group_of(attempt_id).key.demand)
        if not self.preemption.is_privileged(candidate_queue.candidates[attempt_id], amount):
            return None
        order = reclaim_order(lane.key.project, amount, self._state.tree, self._state.fair, self.now)
        return order, position, index, lane

    def _make_room(self, attempt_id: str, group: ShapeGroup) -> bool:
        head, demand = self._state.queue.candidates[attempt_id], group.key.demand
        if group.key.at_once is not None and group in self._rooms:
            return False  # an element counts against the limit only once it has started
        windows = self._state.windows
        blocked = windows.nodes_of(windows.blocking(head.project, self.now, self.now + group.key.limit_s))
        barred = (self.reservations.nodes - self.preemption.nodes) | blocked
        room = self.preemption.make_room(head, demand, barred, self.reservations.watts())
        self.valid_until = min(self.valid_until, self.preemption.settles_at)
        self.replan_at = min(self.replan_at, self.preemption.settles_at)
        if room is None:
            if self._state.has_caps:
                self.valid_until = self.now  # power decided, so a newcomer may be the one that can be evicted
            self._is_quota_unserved |= self._state.tree.has_quota(head.project)
            return False
        # From then on a job that starts on a node with a window may not end in time.
        moments = (window.from_at - group.key.limit_s for window in windows.all)
        self.valid_until = min(
            (moment for moment in moments if self.now <= moment < self.valid_until), default=self.valid_until
        )
        self._rooms.add(group)
        self.heads.setdefault(head.queue, head)
        self.reservations.add(CapacityReservation(head, inf, room.spare, room.stopping, room.draw))
        return True

    def _start_heads(self, lanes: list[QueueLane]) -> None:
        """Start each queue's candidates up to the first that does not fit. A candidate that cannot run blocks
        no other.
        """
        passed: set[ShapeGroup] = set()
        while True:
            firsts = [lane.first(passed) for lane in lanes if lane.key.queue not in self.heads]
            position = min([first for first in firsts if first is not None], default=None)
            if position is None:
                return
            attempt_id = position[1][-1]
            group = self._state.queue.group_of(attempt_id)
            if self._start(group, attempt_id):
                continue
            if self._waits_for_room(group):
                self._promise(self._state.queue.candidates[attempt_id], group)
            else:
                passed.add(group)

    def _reserve_quota(self, lanes: list[QueueLane]) -> None:
        """Keep quota for the first due candidates that wait for their own project, so that no other job of it
        uses that.
        """
        if not self._state.tree.has_ceilings:
            return
        for *_, attempt_id in sorted(lane.due[0] for lane in lanes if lane.due):
            group = self._state.queue.group_of(attempt_id)
            refusal = self._state.refusal(group.lane.key.project, group.key.demand)
            is_wanted = refusal is not None and not refusal.reserved and refusal.requested <= refusal.allowed
            if refusal is not None and is_wanted and self._is_possible(group):
                self._state.tree.reserve(refusal)

    def _start_shortest(self, groups: list[ShapeGroup]) -> None:
        """Start candidates of equal rank by score. If a candidate does not fit, its whole group is done for
        this pass.
        """
        most, most_beside = self._state.capacity.most_free(), self.reservations.most_free()
        gone_in_time = self.reservations.first_at - self.now
        queue = []
        for group in groups:
            need = group.key.demand.need
            cpus, gpus, memory = most if group.key.limit_s <= gone_in_time else most_beside
            if need.millicpus <= cpus and need.num_gpus <= gpus and (need.memory_bytes or 0) <= memory:
                queue.append((group.by_score[0], group))
        heapify(queue)
        while queue:
            (*_, attempt_id), group = queue[0]
            if self._start(group, attempt_id) and group.by_score:
                heapreplace(queue, (group.by_score[0], group))
            else:
                heappop(queue)

    def _start(self, group: ShapeGroup, attempt_id: str) -> bool:
        state, project, (demand, limit_s, array_id, at_once) = self._state, group.lane.key.project, group.key
        if at_once is not None and state.num_of_array(array_id) >= at_once:
            return False
        ends_at = self.now + limit_s
        tasks = self._search.tasks_for(project, demand, self.now, ends_at)
        if not tasks:
            return False
        self.reservations.take(demand.need, tasks, ends_at)
        state.start(attempt_id, tasks, self.now)
        self.starts.append(PlannedStart(attempt_id=attempt_id, allocation=tasks))
        if self._is_quota_unserved or (self._rooms and state.tree.has_quota(project)):
            self.valid_until = self.now  # it used quota that may have been another job's ground to evict
        return True

    def _waits_for_room(self, group: ShapeGroup) -> bool:
        """Only a job that the open nodes could hold makes others wait: a job that cannot run blocks no other
        job.
        """
        return self._state.refusal(group.lane.key.project, group.key.demand) is None and self._is_possible(
            group
        )

    def _is_possible(self, group: ShapeGroup) -> bool:
        """Whether the open nodes could hold it and its array is not at its limit."""
        demand, _, array_id, at_once = group.key
        if at_once is not None and self._state.num_of_array(array_id) >= at_once:
            return False
        demand = self._state.allowed(group.lane.key.project, demand)
        return self._state.feasibility.fits_open_nodes(demand) and self._state.has_power_for(demand)

    def _promise(self, head: Candidate, group: ShapeGroup) -> None:
        """Reserve the nodes that serve the head earliest. If that time is unknown, reserve only once its
        patience has ended.
        """
        self.heads[head.queue] = head
        demand, capacity = self._state.allowed(head.project, group.key.demand), self._state.capacity
        open_hours = self._state.windows.open_hours(head.project, group.key.limit_s, self.now)
        future_power = self._future_power()
        earliest = self._state.earliest_starts.earliest_start(
            demand, self.reservations.nodes, self.now, open_hours, future_power
        )
        if earliest is None:
            return
        if earliest.at == inf:
            waits_since = max(head.submitted_at, head.not_before)
            patient_until = waits_since + self._policy.patience_of(head.expected_s)
            if self.now < patient_until:
                self.valid_until = min(self.valid_until, patient_until)
                self.replan_at = min(self.replan_at, patient_until)
                return
            draw = _draw(demand, earliest.nodes, future_power, -inf)
            self.reservations.add(CapacityReservation(head, inf, dict.fromkeys(earliest.nodes), draw=draw))
            return
        nodes = [capacity.nodes[name] for name in earliest.nodes]
        spare = {
            node.name: remaining_after(free_by(node, earliest.at), demand.need, node.whole) for node in nodes
        }
        self.reservations.add(
            CapacityReservation(
                head, earliest.at, spare, draw=_draw(demand, earliest.nodes, future_power, earliest.at)
            )
        )
        self.valid_until = min(self.valid_until, earliest.at)

    def _future_power(self) -> FuturePower | None:
        """Return None if no rack has a cap."""
        state = self._state
        if not state.has_caps:
            return None
        return FuturePower(state.power, self.reservations.watts())


def _draw(demand: Demand, names: list[str], future_power: FuturePower | None, at: float) -> PowerDraw | None:
    """Return what it will draw from its racks at `at`, and what is left. At -infinity, count all that runs
    now.
    """
    if future_power is None:
        return None
    watts, left = future_power.power.of_nodes(demand.need, names), future_power.left(at)
    return PowerDraw(watts, {rack: left[rack] - watts[rack] for rack in watts})
