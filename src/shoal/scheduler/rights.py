"""Who may evict whom.

There are two grounds. A job of a class that preempts takes from jobs of lesser priority. A project within its
quota takes back what another one borrowed, from jobs of no higher priority. Nobody takes from a class that
says it is not preemptible.

Evictions do not go back and forth. Whoever may evict another is looked at before it when both wait: the
higher priority first, and of equal priority whoever may reclaim from the other (`claim_order`). So the
evicted job gets its nodes back only when the other has started or no longer waits; and it cannot evict in its
turn, since a lesser priority gives no ground, and the project it gave way to is still within its quota.
"""

from __future__ import annotations

from itertools import zip_longest

from shoal.scheduler.classes import class_of
from shoal.scheduler.devices import Amount
from shoal.scheduler.fair import Fair
from shoal.scheduler.policy import Policy
from shoal.scheduler.snapshot import Candidate
from shoal.scheduler.tree import Tree
from shoal.scheduler.types import Ground

ClaimOrder = tuple[tuple[int, float], ...]


def can_preempt(priority: int, policy: Policy) -> bool:
    return class_of(priority, policy.classes).can_preempt


def ground(
    head: Candidate, asked: Amount, priority: int, project: str, tree: Tree, policy: Policy
) -> Ground | None:
    """By what right `head` may evict a job of that priority and project now; None: it may not."""
    if priority > head.priority or not class_of(priority, policy.classes).is_preemptible:
        return None
    if priority < head.priority and can_preempt(head.priority, policy):
        return Ground.PRIORITY
    if project != head.project and tree.may_reclaim(head.project, asked, project):
        return Ground.QUOTA
    return None


def claim_order(project: str, asked: Amount, tree: Tree, fair: Fair, now: float) -> ClaimOrder:
    """Sorts those of one priority who ask for so much: whoever may reclaim from another comes before it.

    At each level from the top: whether a quota from there down covers what is asked, then who had less.
    Where the lines of two projects part, one who may reclaim is covered below, and the other is not.
    """
    covered, standing = tree.covered(project, asked), fair.standing(project, now)
    return tuple(
        (0 if is_covered else 1, had) for is_covered, had in zip_longest(covered, standing, fillvalue=0)
    )
