"""Planner: the scheduler's interface for the control plane and the simulator.

Callers report every change, then ask for a plan. A plan follows from the facts and the time alone. State that
is kept between plans only saves work: while nothing was released, only newcomers can start, so a plan looks
at newcomers alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from math import inf

import msgspec

from shoal.model.node import Window
from shoal.scheduler.cycle import SchedulingCycle
from shoal.scheduler.explain.explainer import Explainer
from shoal.scheduler.facts.amounts import ProjectInfo
from shoal.scheduler.facts.cluster_state import ClusterState
from shoal.scheduler.facts.plan import Explanation, Plan, Promise
from shoal.scheduler.facts.policy import Policy
from shoal.scheduler.facts.snapshot import Candidate, Holding, NodeInfo, Snapshot, TaskLoss
from shoal.scheduler.order.fair_share import Usage
from shoal.scheduler.preemption.growth import choose_growth, explain_no_growth
from shoal.scheduler.replacements import Replacements

MIN_HEAP_ENTRIES = 64
"""Stale entries that a heap may hold before it is rebuilt, in addition to as many as it has current
entries."""


class Planner:
    """Not thread-safe. Facts may arrive in any order and more than once."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._state = ClusterState(policy)
        self._projects: tuple[ProjectInfo, ...] = ()
        self._newcomers: dict[str, Candidate] = {}
        self._moments: list[tuple[float, str]] = []
        """When deferred candidates may start, earliest first. Entries of candidates that left stay until they
        are popped."""
        self._cycle = SchedulingCycle(self._state, policy, -inf)
        """The last complete cycle."""
        self._is_unchanged = False
        """Nothing has changed since the last cycle that could let a candidate other than a newcomer start."""
        self.planned_at = -inf
        self._unreplaced: dict[str, Explanation] = {}
        """By attempt, why the last plan found no other node for its lost task."""
        self._explainer: Explainer | None = None

    @classmethod
    def of(cls, snapshot: Snapshot, policy: Policy) -> Planner:
        planner = cls(policy)
        planner.set_projects(snapshot.projects, snapshot.usages)
        planner.set_windows(snapshot.windows)
        for view in snapshot.nodes:
            planner.set_node(view)
        for holding in snapshot.holdings:
            planner.hold(holding)
        for candidate in snapshot.candidates:
            planner.add(candidate)
        planner.set_losses(snapshot.losses)
        return planner

    @property
    def has_unconfirmed(self) -> bool:
        """Whether any start or replacement of the last plan is neither confirmed nor undone."""
        return bool(self._state.unconfirmed or self._state.moves)

    def snapshot(self) -> Snapshot:
        """Return the facts. A planner made from them makes the same plan."""
        state = self._state
        return Snapshot(
            nodes=tuple(node.view for _, node in sorted(state.capacity.nodes.items())),
            holdings=tuple(holding for _, holding in sorted(state.holdings.items())),
            candidates=tuple(sorted(self.waiting, key=lambda candidate: candidate.attempt_id)),
            projects=self._projects,
            usages=state.fair.usages(),
            windows=state.windows.all,
            losses=tuple(
                TaskLoss(attempt_id=attempt_id, node=node)
                for attempt_id, node in sorted(state.losses.items())
            ),
        )

    def set_projects(self, views: Iterable[ProjectInfo], usages: Iterable[Usage] = ()) -> None:
        """Replace the settings of all projects. `usages`: what they had used before anything was held."""
        self._projects = tuple(sorted(views, key=lambda view: view.name))
        self._state.tree.change(self._projects)
        self._state.fair.load_usages(usages)
        self._mark_changed()

    def set_windows(self, windows: Iterable[Window]) -> None:
        """Replace all declared windows, in any order. Windows that are over may be left out."""
        if self._state.windows.change(windows):
            self._mark_changed()

    def competing_usages(self) -> tuple[Usage, ...]:
        """Return the usage of every project that has any, if usage can affect the order of candidates;
        otherwise nothing.
        """
        return self._state.fair.usages() if self._state.has_rivals else ()

    def correct_usage(self, usages: Iterable[Usage]) -> None:
        """Set usage to what was recorded with a decision, so that the decision can be replayed.

        The recorded candidates show, as they did then, whether usage was left out or no project had any.
        """
        if self._state.has_rivals:
            self._state.fair.correct(usages)
        self._mark_changed()

    def set_node(self, view: NodeInfo) -> None:
        """Add a node, or change one."""
        if self._state.set_node(view):
            self._mark_changed()

    def drop_node(self, name: str) -> None:
        if name in self._state.capacity.nodes:
            self._state.capacity.drop_node(name)
            self._mark_changed()

    def add(self, candidate: Candidate) -> None:
        """Queue the candidate. If it is added again, the latest facts count."""
        if self._state.drop(candidate.attempt_id):
            self._mark_changed()
        if candidate.unmet:
            self._state.deferred[candidate.attempt_id] = candidate
        elif candidate.not_before > 0:
            self._wait_until(candidate)
        else:
            self._queue(candidate)
        self._explainer = None

    def drop(self, attempt_id: str) -> None:
        """The attempt is not queued any more."""
        self._newcomers.pop(attempt_id, None)
        self._explainer = None
        if self._state.drop(attempt_id):
            self._mark_changed()

    def hold(self, holding: Holding) -> None:
        """The attempt holds resources. If the last plan started it or moved one of its tasks, this confirms
        that.
        """
        self.drop(holding.attempt_id)
        self._unreplaced.pop(holding.attempt_id, None)
        if self._state.hold(holding):
            self._mark_changed()
        self._explainer = None

    def holds(self, attempt_id: str) -> bool:
        return attempt_id in self._state.holdings

    def save(self, attempt_id: str, at: float | None) -> bool:
        """The attempt's work up to `at` is safe; None: it has no known checkpoint.

        A checkpoint decides which attempt is evicted, never whether any is. Return False if the attempt does
        not hold anything.
        """
        return self._state.save(attempt_id, at)

    def set_losses(self, losses: Iterable[TaskLoss]) -> None:
        """Replace all lost tasks. The next plan decides all of them, so they are reported again if they still
        wait after it.
        """
        self._state.losses = {loss.attempt_id: loss.node for loss in losses}
        self._unreplaced.clear()
        if self._state.losses:
            self._mark_changed()

    def release(self, attempt_id: str, at: float) -> None:
        """The attempt holds nothing since `at`."""
        self._unreplaced.pop(attempt_id, None)
        if self._state.release(attempt_id, at):
            self._mark_changed()

    def undo(self, attempt_id: str) -> None:
        """What the last plan decided for this attempt was not carried out. It waits again, or its lost task
        has no replacement.
        """
        if self._state.undo_move(attempt_id):
            self._mark_changed()
        candidate = self._state.undo(attempt_id)
        if candidate is not None:
            if candidate.not_before > self.planned_at:
                self._wait_until(candidate)  # the clock was set back since
            else:
                self._state.queue.add(candidate)
            self._mark_changed()

    @property
    def is_settled(self) -> bool:
        """Whether the last plan was carried out in full and nothing has happened that needs another plan."""
        return self._is_unchanged and not self._newcomers and not self.has_unconfirmed

    @property
    def num_waiting(self) -> int:
        return len(self._state.queue) + len(self._state.deferred)

    def plan(self, now: float) -> Plan:
        """Choose the starts and replacements, and hold their resources. Of what waits, the plan explains only
        lost tasks; see `explain`.
        """
        if self._moments or now < self.planned_at:
            self._wake(now)
        newcomers, self._newcomers, self._explainer = list(self._newcomers.values()), {}, None
        state, cycle = self._state, self._cycle
        state.capacity.packing.learn(state.capacity.shape_counts.profile())
        # If the clock was set back, recorded times mean something else.
        is_later = self.planned_at <= now < cycle.valid_until and now < state.queue.next_due()
        try:
            if not (self._is_unchanged and is_later and cycle.run_newcomers(newcomers, now)):
                cycle = self._cycle = SchedulingCycle(state, self.policy, now)
                cycle.run()
                # Until the planner learns that the evicted attempts stop, each plan asks for them again.
                self._is_unchanged = not cycle.preemption.evictions
        except BaseException:
            # The caller never receives these decisions, so it could not undo them later.
            for attempt_id in [*state.moves, *(start.attempt_id for start in cycle.starts)]:
                self.undo(attempt_id)
            self._mark_changed()
            raise
        self.planned_at = now
        replan_at = min(cycle.replan_at, self._moments[0][0] if self._moments else inf)
        starts, cycle.starts = tuple(cycle.starts), []
        replacements, cycle.replacements = cycle.replacements, Replacements([], {})
        self._unreplaced |= replacements.explanations
        state.losses = {}
        is_busy = starts or cycle.preemption.evictions or replacements.planned
        grows = (
            choose_growth(state, cycle.reservations, self.policy, now)
            if state.elastic and not is_busy
            else None
        )
        return Plan(
            replacements=tuple(replacements.planned),
            starts=starts,
            promises=cycle.promises(),
            evictions=(grows,) if grows else tuple(cycle.preemption.evictions),
            explanations=tuple(replacements.explanations.values()),
            replan_at=None if replan_at == inf else replan_at,
        )

    @property
    def waiting(self) -> list[Candidate]:
        """Every waiting candidate, for whatever reason, in no order."""
        return [*self._state.queue.candidates.values(), *self._state.deferred.values()]

    @property
    def promises(self) -> tuple[Promise, ...]:
        """The promises of the last plan."""
        return self._cycle.promises()

    def explain(self, attempt_id: str, now: float) -> Explanation | None:
        """Return why the attempt has not started, as of the last plan; None if it does not wait."""
        state = self._state
        deferred = state.deferred.get(attempt_id)
        if deferred is None and attempt_id not in state.queue.candidates:
            return None
        if self._explainer is None:
            self._explainer = Explainer(state, self._cycle.reservations, self.policy, now)
        return self._explainer.explain(deferred or state.queue.candidates[attempt_id])

    def explain_loss(self, attempt_id: str) -> Explanation | None:
        """Return why the last plan found no other node for the attempt's lost task; None if it had none, or
        if the losses were reported again since then.
        """
        return self._unreplaced.get(attempt_id)

    def explain_growth(self, attempt_id: str, now: float) -> Explanation | None:
        """Return why a running attempt has fewer nodes than it could use; None if it has all of them or holds
        nothing.
        """
        holding = self._state.holdings.get(attempt_id)
        if holding is None or attempt_id not in self._state.elastic:
            return None
        return explain_no_growth(self._state, self._cycle.reservations, self.policy, holding, now)

    def _queue(self, candidate: Candidate) -> None:
        self._state.queue.add(candidate)
        self._newcomers[candidate.attempt_id] = candidate

    def _wait_until(self, candidate: Candidate) -> None:
        deferred = self._state.deferred
        deferred[candidate.attempt_id] = candidate
        heappush(self._moments, (candidate.not_before, candidate.attempt_id))
        if len(self._moments) > 2 * len(deferred) + MIN_HEAP_ENTRIES:
            # A candidate in backoff is added again before every plan, with a slightly different time.
            self._moments = [
                (entry.not_before, entry.attempt_id) for entry in deferred.values() if not entry.unmet
            ]
            heapify(self._moments)

    def _wake(self, now: float) -> None:
        """Queue the candidates whose time has come. If the clock was set back, defer queued ones again."""
        if now < self.planned_at:
            for early in [
                queued for queued in self._state.queue.candidates.values() if queued.not_before > now
            ]:
                self._state.queue.remove(early.attempt_id)
                self._wait_until(early)
        while self._moments and self._moments[0][0] <= now:
            _, attempt_id = heappop(self._moments)
            candidate = self._state.deferred.get(attempt_id)
            if candidate is not None and not candidate.unmet and candidate.not_before <= now:
                del self._state.deferred[attempt_id]
                self._queue(candidate)

    def _mark_changed(self) -> None:
        self._is_unchanged = False
        self._explainer = None


def plan(snapshot: Snapshot, policy: Policy, now: float) -> Plan:
    """Start or explain every candidate, exactly once. Never changes the snapshot."""
    planner = Planner.of(snapshot, policy)
    result = planner.plan(now)
    starting = {start.attempt_id for start in result.starts}
    waiting = sorted(
        candidate.attempt_id for candidate in snapshot.candidates if candidate.attempt_id not in starting
    )
    explanations = tuple(
        explanation
        for explanation in (planner.explain(attempt_id, now) for attempt_id in waiting)
        if explanation is not None
    )
    return msgspec.structs.replace(result, explanations=(*result.explanations, *explanations))
