"""The planner's interface over `plan`, until the incremental one is here: right, and slow."""

from __future__ import annotations

from shoal.scheduler import Candidate, Holding, NodeView, Plan, Policy, Snapshot, plan


class Planner:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._nodes: dict[str, NodeView] = {}
        self._holdings: dict[str, Holding] = {}
        self._candidates: dict[str, Candidate] = {}

    def set_node(self, view: NodeView) -> None:
        self._nodes[view.name] = view

    def drop_node(self, name: str) -> None:
        self._nodes.pop(name, None)

    def add(self, candidate: Candidate) -> None:
        self._candidates[candidate.attempt_id] = candidate

    def release(self, attempt_id: str) -> None:
        self._holdings.pop(attempt_id, None)

    def plan(self, now: float) -> Plan:
        facts = Snapshot(
            nodes=tuple(self._nodes.values()),
            holdings=tuple(self._holdings.values()),
            candidates=tuple(self._candidates.values()),
        )
        made = plan(facts, self._policy, now)
        for start in made.starts:
            candidate = self._candidates.pop(start.attempt_id)
            self._holdings[start.attempt_id] = Holding(
                attempt_id=start.attempt_id,
                job_id=candidate.job_id,
                project=candidate.project,
                priority=candidate.priority,
                allocation=start.allocation,
                placed_at=now,
                time_limit_s=candidate.request.time_limit_s,
            )
        return made
