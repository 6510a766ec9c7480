"""The scheduler as the control plane and the simulator hold it: told what changes, asked what to do.

A plan follows from the facts and the moment alone. What is remembered between plans only saves work: as
long as nothing was given back, only newcomers can start.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from math import inf

import msgspec

from shoal.model.window import Window
from shoal.scheduler.book import Book
from shoal.scheduler.cycle import Cycle
from shoal.scheduler.devices import ProjectView
from shoal.scheduler.explain import Explainer
from shoal.scheduler.fair import Usage
from shoal.scheduler.growth import growth
from shoal.scheduler.not_grown import not_grown
from shoal.scheduler.policy import Policy
from shoal.scheduler.snapshot import Candidate, Holding, NodeView, Snapshot
from shoal.scheduler.types import Explanation, Plan, Promise

SOME = 64
"""Entries of a heap that may be out of date before it is made anew, besides as many as are not."""


class Planner:
    """Not safe for threads. Facts may come in any order and be repeated."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._book = Book(policy)
        self._projects: tuple[ProjectView, ...] = ()
        self._newcomers: dict[str, Candidate] = {}
        self._moments: list[tuple[float, str]] = []
        """When those kept back may start, soonest first; some may have gone since."""
        self._cycle = Cycle(self._book, policy, -inf)
        """The last whole one."""
        self._is_calm = False
        """Nothing has changed since that may let anybody start but newcomers."""
        self.planned_at = -inf
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
        return planner

    @property
    def has_unconfirmed(self) -> bool:
        """Whether starts of the last plan are neither confirmed nor undone."""
        return bool(self._book.unconfirmed)

    def snapshot(self) -> Snapshot:
        """The facts: a planner made of them plans the same."""
        book = self._book
        return Snapshot(
            nodes=tuple(node.view for _, node in sorted(book.capacity.nodes.items())),
            holdings=tuple(holding for _, holding in sorted(book.holdings.items())),
            candidates=tuple(sorted(self.waiting, key=lambda one: one.attempt_id)),
            projects=self._projects,
            usages=book.fair.usages(),
            windows=book.windows.all,
        )

    def set_projects(self, views: Iterable[ProjectView], usages: Iterable[Usage] = ()) -> None:
        """All of them, as they are set now. `usages`: what they had before anything was held."""
        self._projects = tuple(sorted(views, key=lambda view: view.name))
        self._book.tree.change(self._projects)
        self._book.fair.tell(usages)
        self._disturb()

    def set_windows(self, windows: Iterable[Window]) -> None:
        """All that are declared, in any order. Those that are over may be left out."""
        if self._book.windows.change(windows):
            self._disturb()

    def rivals(self) -> tuple[Usage, ...]:
        """What all projects had that had any, where that may order those who wait; else nothing."""
        return self._book.fair.usages() if self._book.has_rivals else ()

    def correct_usage(self, usages: Iterable[Usage]) -> None:
        """Projects had what was recorded with a decision, so that it can be made again.

        By who waits, as then, it is known whether nothing was recorded or nobody had anything.
        """
        if self._book.has_rivals:
            self._book.fair.correct(usages)
        self._disturb()

    def set_node(self, view: NodeView) -> None:
        """A new node, or one that changed."""
        if self._book.set_node(view):
            self._disturb()

    def drop_node(self, name: str) -> None:
        if name in self._book.capacity.nodes:
            self._book.capacity.drop_node(name)
            self._disturb()

    def add(self, candidate: Candidate) -> None:
        """It is queued. Added again, it is as said last."""
        if self._book.drop(candidate.attempt_id):
            self._disturb()
        if candidate.unmet:
            self._book.kept_back[candidate.attempt_id] = candidate
        elif candidate.not_before > 0:
            self._wait_until(candidate)
        else:
            self._queue(candidate)
        self._explainer = None

    def drop(self, attempt_id: str) -> None:
        """It is not queued any more."""
        self._newcomers.pop(attempt_id, None)
        self._explainer = None
        if self._book.drop(attempt_id):
            self._disturb()

    def hold(self, holding: Holding) -> None:
        """It holds resources; if the last plan started it, that is confirmed."""
        self.drop(holding.attempt_id)
        if self._book.hold(holding):
            self._disturb()
        self._explainer = None

    def holds(self, attempt_id: str) -> bool:
        return attempt_id in self._book.holdings

    def save(self, attempt_id: str, at: float | None) -> bool:
        """Its work up to then is safe; None: nobody knows up to when. Decides who is evicted, and not whether
        anybody is. False: it is not known to hold anything yet.
        """
        return self._book.save(attempt_id, at)

    def release(self, attempt_id: str, at: float) -> None:
        """It holds nothing any more, since `at`."""
        if self._book.release(attempt_id, at):
            self._disturb()

    def undo(self, attempt_id: str) -> None:
        """The last plan's start of it was not carried out: it waits again."""
        candidate = self._book.undo(attempt_id)
        if candidate is not None:
            if candidate.not_before > self.planned_at:
                self._wait_until(candidate)  # the clock was set back since
            else:
                self._book.rows.add(candidate)
            self._disturb()

    @property
    def is_settled(self) -> bool:
        """All of the last plan is carried out, and nothing has happened since that another must look at."""
        return self._is_calm and not self._newcomers and not self._book.unconfirmed

    @property
    def num_waiting(self) -> int:
        return len(self._book.rows) + len(self._book.kept_back)

    def plan(self, now: float) -> Plan:
        """Who starts; they hold what they are given when this returns. Says nothing about the others."""
        if self._moments or now < self.planned_at:
            self._wake(now)
        newcomers, self._newcomers, self._explainer = list(self._newcomers.values()), {}, None
        book, cycle = self._book, self._cycle
        book.capacity.packing.learn(book.capacity.typical.profile())
        # A clock that was set back makes times mean something else.
        is_later = self.planned_at <= now < cycle.good_until and now < book.rows.next_due()
        try:
            if not (self._is_calm and is_later and cycle.run_newcomers(newcomers, now)):
                cycle = self._cycle = Cycle(book, self.policy, now)
                cycle.run()
                # Until it is told that they stop, another plan asks again.
                self._is_calm = not cycle.preemption.evictions
        except BaseException:
            # Nobody will hear of these starts, so nobody could undo them later.
            for start in cycle.starts:
                self.undo(start.attempt_id)
            self._disturb()
            raise
        self.planned_at = now
        again = min(cycle.look_again_at, self._moments[0][0] if self._moments else inf)
        starts, cycle.starts = tuple(cycle.starts), []
        is_busy = starts or cycle.preemption.evictions
        grows = growth(book, cycle.claims, self.policy, now) if book.elastic and not is_busy else None
        return Plan(
            starts=starts,
            promises=cycle.promises(),
            evictions=(grows,) if grows else tuple(cycle.preemption.evictions),
            look_again_at=None if again == inf else again,
        )

    @property
    def waiting(self) -> list[Candidate]:
        """Everybody who waits, for whatever reason, in no order."""
        return [*self._book.rows.candidates.values(), *self._book.kept_back.values()]

    @property
    def promises(self) -> tuple[Promise, ...]:
        """Those of the last plan."""
        return self._cycle.promises()

    def explain(self, attempt_id: str, now: float) -> Explanation | None:
        """Why it has not started, as of the last plan; None when it does not wait."""
        book = self._book
        kept_back = book.kept_back.get(attempt_id)
        if kept_back is None and attempt_id not in book.rows.candidates:
            return None
        if self._explainer is None:
            self._explainer = Explainer(book, self._cycle.claims, self.policy, now)
        return self._explainer.explain(kept_back or book.rows.candidates[attempt_id])

    def explain_growth(self, attempt_id: str, now: float) -> Explanation | None:
        """Why one that runs has fewer nodes than it could use; None when it has not, or holds nothing."""
        one = self._book.holdings.get(attempt_id)
        if one is None or attempt_id not in self._book.elastic:
            return None
        return not_grown(self._book, self._cycle.claims, self.policy, one, now)

    def _queue(self, candidate: Candidate) -> None:
        self._book.rows.add(candidate)
        self._newcomers[candidate.attempt_id] = candidate

    def _wait_until(self, candidate: Candidate) -> None:
        kept_back = self._book.kept_back
        kept_back[candidate.attempt_id] = candidate
        heappush(self._moments, (candidate.not_before, candidate.attempt_id))
        if len(self._moments) > 2 * len(kept_back) + SOME:
            # Whoever rests is told of before every plan, with a moment that differs in its last digits.
            self._moments = [(one.not_before, one.attempt_id) for one in kept_back.values() if not one.unmet]
            heapify(self._moments)

    def _wake(self, now: float) -> None:
        """Let those start whose moment has come; a clock that was set back takes it away again."""
        if now < self.planned_at:
            for early in [one for one in self._book.rows.candidates.values() if one.not_before > now]:
                self._book.rows.remove(early.attempt_id)
                self._wait_until(early)
        while self._moments and self._moments[0][0] <= now:
            _, attempt_id = heappop(self._moments)
            candidate = self._book.kept_back.get(attempt_id)
            if candidate is not None and not candidate.unmet and candidate.not_before <= now:
                del self._book.kept_back[attempt_id]
                self._queue(candidate)

    def _disturb(self) -> None:
        self._is_calm = False
        self._explainer = None


def plan(snapshot: Snapshot, policy: Policy, now: float) -> Plan:
    """Every candidate either starts or is explained, exactly once. Never changes the snapshot."""
    planner = Planner.of(snapshot, policy)
    made = planner.plan(now)
    starting = {start.attempt_id for start in made.starts}
    waiting = sorted(one.attempt_id for one in snapshot.candidates if one.attempt_id not in starting)
    told = tuple(said for said in (planner.explain(one, now) for one in waiting) if said is not None)
    return msgspec.structs.replace(made, explanations=told)
