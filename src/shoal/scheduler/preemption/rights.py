"""Which jobs a candidate may evict, and on which ground.

There are two grounds. A job of a class that preempts may evict jobs of lower priority. A project within its
quota may take back what another project borrowed, from jobs of no higher priority. No job may evict one of a
class that is not preemptible.

Evictions do not go back and forth. If one job may evict another, it is considered first when both wait: the
higher priority first, and at equal priority the one that may reclaim from the other (`reclaim_order`). So the
evicted job gets its nodes back only when the other has started or no longer waits. It cannot evict in turn,
because a lower priority gives no ground, and because the project that reclaimed is still within its quota.

A `PreemptionPlan` collects the attempts that stop for one job while the search for them runs. Every right
depends on what projects hold, so each chosen attempt counts as gone for the next question. If a ceiling
blocks the job, its own project's or one above it, attempts below that ceiling stop until it allows the job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest

from shoal.scheduler.facts.amounts import DeviceAmount, held_devices
from shoal.scheduler.facts.plan import EvictionGround
from shoal.scheduler.facts.policy import Policy, priority_class
from shoal.scheduler.facts.snapshot import Candidate, Holding
from shoal.scheduler.order.fair_share import FairShare
from shoal.scheduler.order.project_tree import DeviceKind, ProjectTree, QuotaRefusal
from shoal.scheduler.preemption.costs import PriorityGroup

ReclaimOrder = tuple[tuple[int, float], ...]


def can_preempt(priority: int, policy: Policy) -> bool:
    return priority_class(priority, policy.classes).can_preempt


def eviction_ground(
    head: Candidate, amount: DeviceAmount, priority: int, project: str, tree: ProjectTree, policy: Policy
) -> EvictionGround | None:
    """Return on which ground `head` may evict a job of that priority and project now; None: it may not."""
    if priority > head.priority or not priority_class(priority, policy.classes).is_preemptible:
        return None
    if priority < head.priority and can_preempt(head.priority, policy):
        return EvictionGround.PRIORITY
    if project != head.project and tree.may_reclaim(head.project, amount, project):
        return EvictionGround.QUOTA
    return None


def reclaim_order(
    project: str, amount: DeviceAmount, tree: ProjectTree, fair: FairShare, now: float
) -> ReclaimOrder:
    """Return a key that sorts jobs of one priority: a job that may reclaim from another comes before it.

    At each level from the top: whether a quota from there down covers `amount`, then which project used less.
    Below the level where the lines of two projects part, a project that may reclaim is covered, and the other
    is not.
    """
    covered, standing = tree.quota_coverage(project, amount), fair.standing(project, now)
    return tuple(
        (0 if is_covered else 1, used) for is_covered, used in zip_longest(covered, standing, fillvalue=0)
    )


class PreemptionPlan:
    """The attempts that stop for one job, the ground for each, and whether its project may then start it."""

    def __init__(self, head: Candidate, amount: DeviceAmount, tree: ProjectTree, policy: Policy) -> None:
        self.amount = amount
        self.grounds: dict[str, EvictionGround] = {}
        """By attempt, why it may be evicted."""
        self._head = head
        self._tree = tree
        self._policy = policy
        self._stopped: dict[str, Holding] = {}
        self._refusal = tree.refusal(head.project, amount)
        """The ceiling that blocked the job before any attempt was chosen."""

    def group_choices(self, groups: Iterable[PriorityGroup]) -> list[list[PriorityGroup]]:
        """Return which groups may be evicted now. If a ceiling blocks the job, try those below it alone
        first.
        """
        allowed = [group for group in groups if self._ground(group.priority, group.project) is not None]
        if self._refusal is None:
            return [allowed]
        below = [group for group in allowed if self._counts(group.project, self._refusal)]
        return [below, allowed] if below else []

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Restore the tree afterwards. `grounds` keep what was found."""
        try:
            yield
        finally:
            self.undo()

    def take(self, victims: Sequence[Holding]) -> bool:
        """Stop these attempts, the smallest first, if all of them may be evicted."""
        stopped: list[Holding] = []
        for holding in sorted(
            victims, key=lambda holding: (held_devices(holding.allocation), holding.attempt_id)
        ):
            ground = self._ground(holding.priority, holding.project)
            if ground is None:
                for taken_before in stopped:
                    self._resume(taken_before)
                return False
            self.grounds[holding.attempt_id] = ground
            self._stopped[holding.attempt_id] = holding
            self._tree.give(holding.project, held_devices(holding.allocation))
            stopped.append(holding)
        return True

    def spare(self, holding: Holding) -> bool:
        """Let the attempt continue, if the job is allowed beside it."""
        self._resume(holding)
        if self._tree.refusal(self._head.project, self.amount) is None:
            return True
        self._stopped[holding.attempt_id] = holding
        self._tree.give(holding.project, held_devices(holding.allocation))
        return False

    def stop_until_allowed(self, cheapest: Iterator[Holding]) -> list[Holding] | None:
        """Stop further attempts until the job is allowed, and return them. None: it is never allowed."""
        stopped: list[Holding] = []
        for holding in cheapest:
            refusal = self._tree.refusal(self._head.project, self.amount)
            if refusal is None:
                return stopped
            if self._helps(holding, refusal) and self.take([holding]):
                stopped.append(holding)
        is_allowed = self._tree.refusal(self._head.project, self.amount) is None
        return stopped if is_allowed else None

    def undo(self) -> None:
        for holding in list(self._stopped.values()):
            self._resume(holding)

    def _resume(self, holding: Holding) -> None:
        del self._stopped[holding.attempt_id]
        self._tree.take(holding.project, held_devices(holding.allocation))

    def _ground(self, priority: int, project: str) -> EvictionGround | None:
        return eviction_ground(self._head, self.amount, priority, project, self._tree, self._policy)

    def _helps(self, holding: Holding, refusal: QuotaRefusal) -> bool:
        held = held_devices(holding.allocation)
        gives = held.milligpus if refusal.device is DeviceKind.GPUS else held.millicpus
        return gives > 0 and self._counts(holding.project, refusal)

    def _counts(self, project: str, refusal: QuotaRefusal) -> bool:
        """Whether what the project holds counts against that ceiling."""
        return any(view.name == refusal.by for view in self._tree.ancestry(project))
