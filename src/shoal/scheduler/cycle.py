"""Decide which waiting attempts start now, and on which nodes.

A cycle reads one snapshot and returns one plan. It never talks to an engine, never reads the
clock and never changes the snapshot, so the simulator runs exactly this code.
"""

from __future__ import annotations

from math import inf

import msgspec

from shoal.model.request import Request
from shoal.scheduler.amounts import Demand, demand_of, need_of
from shoal.scheduler.capacity import Capacity
from shoal.scheduler.eligible import Arrays, too_early
from shoal.scheduler.explain import Explainer
from shoal.scheduler.fit import Finders, share_of
from shoal.scheduler.gang import choose
from shoal.scheduler.keep import Kept, nodes_to_keep
from shoal.scheduler.order import in_order
from shoal.scheduler.policy import Policy
from shoal.scheduler.possible import Possible
from shoal.scheduler.snapshot import Candidate, Snapshot
from shoal.scheduler.types import Explanation, Plan, Start
from shoal.scheduler.typical import shape_asked


def plan(snapshot: Snapshot, policy: Policy, now: float) -> Plan:
    """Every candidate either starts or is explained, exactly once, in the order they were looked at."""
    cycle = _Cycle(snapshot, policy, now)
    starts: list[Start] = []
    refusals: list[Candidate | Explanation] = []
    for candidate in in_order(snapshot.candidates):
        early = too_early(candidate, cycle.arrays, now)
        start = None if early else cycle.start(candidate)
        if start:
            starts.append(start)
        else:
            refusals.append(early or candidate)
    # Explained last, so that everybody is told about the same cluster: the one after these starts.
    told = cycle.explained(refusals)
    return Plan(starts=tuple(starts), explanations=tuple(told))


class _Cycle:
    """What one pass over the candidates knows. Capacity only shrinks, so a demand that failed once failed."""

    def __init__(self, snapshot: Snapshot, policy: Policy, now: float) -> None:
        self.arrays = Arrays(snapshot.holdings)
        self._policy = policy
        self._now = now
        self._capacity = Capacity(snapshot.nodes, snapshot.holdings)
        self._possible = Possible(self._capacity)
        for candidate in snapshot.candidates:
            asked = shape_asked(need_of(candidate.request))
            self._capacity.typical.count(asked, candidate.request.min_nodes)
        self._capacity.packing.learn(self._capacity.typical.profile())
        self._demands: dict[tuple[Request, tuple[str, ...]], Demand] = {}
        self._finders = Finders(self._capacity)
        self._failed: set[Demand] = set()
        self._stopped_at: dict[str, Candidate] = {}
        """Per queue, the job it stopped at, where the policy stops queues."""
        self._kept: dict[str, Kept] = {}
        """Per queue, the job that lost patience; in the order they were looked at."""
        self._barred: frozenset[str] = frozenset()
        self._cannot_keep: set[Demand] = set()

    def start(self, candidate: Candidate) -> Start | None:
        """Place it and take its share, or note what its waiting means for those behind it."""
        demand = self._demand(candidate)
        if candidate.queue in self._stopped_at:
            return None
        names = self._choose(demand)
        if not names:
            self._note_waiting(candidate, demand)
            return None
        shares = tuple(share_of(demand.need, self._capacity.nodes[name]) for name in names)
        limit_s = candidate.request.time_limit_s
        for share in shares:
            self._capacity.take(share, inf if limit_s is None else self._now + limit_s)
        self.arrays.start(candidate)
        return Start(attempt_id=candidate.attempt_id, allocation=shares)

    def explained(self, refusals: list[Candidate | Explanation]) -> list[Explanation]:
        kept = list(self._kept.values())
        explainer = Explainer(self._capacity, self._possible, self._finders, kept, self._now)
        told: list[Explanation] = []
        for refusal in refusals:
            if isinstance(refusal, Explanation):
                told.append(refusal)
                continue
            head = self._stopped_at.get(refusal.queue)
            said = explainer.explain(refusal, self._demand(refusal), None if head is refusal else head)
            told.append(msgspec.structs.replace(said, attempt_id=refusal.attempt_id, job_id=refusal.job_id))
        return told

    def _choose(self, demand: Demand) -> list[str]:
        if demand in self._failed:
            return []
        names = choose(demand, self._finders.of(demand.need), self._capacity, self._barred)
        if not names:
            self._failed.add(demand)
        return names

    def _note_waiting(self, candidate: Candidate, demand: Demand) -> None:
        """Only a job that the open nodes could hold makes others wait: one that cannot run blocks nobody."""
        if not self._possible.is_open_for(demand):
            return
        if not self._policy.skip_blocked:
            self._stopped_at[candidate.queue] = candidate
        waited_s = self._now - max(candidate.submitted_at, candidate.not_before)
        if (
            candidate.queue in self._kept
            or waited_s <= self._policy.patience_s
            or demand in self._cannot_keep
        ):
            return
        nodes = nodes_to_keep(demand, self._possible, self._barred, self._now)
        if nodes:
            self._kept[candidate.queue] = Kept(candidate, demand, nodes)
            self._barred |= nodes
        else:
            self._cannot_keep.add(demand)

    def _demand(self, candidate: Candidate) -> Demand:
        key = candidate.request, candidate.excluded_nodes
        if key not in self._demands:
            self._demands[key] = demand_of(*key)
        return self._demands[key]
