"""What is known of whether processes of a task run on its node, and what each kind of knowledge allows. Pure.

A task whose end is believed too early runs twice, and two tasks write one checkpoint or use one GPU. So each
kind of evidence has one row in a literal table, and whatever ends, replaces, stops or fences a task asks it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Evidence(StrEnum):
    """What is known of one task at one moment, the evidence that allows least first."""

    DOUBTFUL = "doubtful"
    """The task is silent, and the cluster says that processes do not die on its node, which may be of the
    task. The supervisor may still live, cut off from us, so nothing is stopped. But perhaps no process is
    left to keep the fence, so this is no end either."""
    ORPHANED_PER_CLUSTER = "orphaned_per_cluster"
    """The cluster found processes of the task that do not die, and no process on the node says otherwise."""
    ORPHANED = "orphaned"
    """The supervisor is dead, and processes of the task live or cannot be proven dead. No process is left to
    keep the fence. However long this lasts, and even if it is no longer observed, it is no end."""
    ALIVE = "alive"
    """The supervisor lives: it holds its lock, or its node agent reports."""
    SUSPENDED = "suspended"
    """The cluster says that it suspended the task. No process on the node can speak."""
    QUEUED = "queued"
    """The task waits in the cluster's own queue, for any length of time. Nothing of it runs, and its node
    agent asks us before it begins."""
    PENDING = "pending"
    """Accepted. The engine has not seen the supervisor alive, which may begin at any moment."""
    UNKNOWN = "unknown"
    """The engine could not look, or saw nothing that proves anything."""
    CLEARED = "cleared"
    """Nothing is known of the task, but the cluster would report processes that do not die on its node, and
    reports none."""
    FENCED = "fenced"
    """The supervisor was silent for longer than its fence, so it has certainly stopped its ranks."""
    DECLARED_DEAD = "declared_dead"
    """An operator declared that nothing is left running there."""
    ENDED = "ended"
    """Nothing of the task runs any more, and nothing of it will: the supervisor wrote an outcome; or all
    processes of a dead supervisor were killed; or the machine was restarted; or the cluster looked and killed
    what was left; or the task was closed before it began; or the engine has no trace of it."""

    @property
    def rule(self) -> Rule:
        """What this evidence allows."""
        return RULES[self]

    @property
    def if_early(self) -> Evidence:
        """The evidence that this is while a living node agent may still be about to report."""
        return self.rule.if_early or self


class Source(StrEnum):
    """Who vouches for a piece of evidence."""

    NODE = "node"
    """A process on the node, or an engine that looks at the node's processes itself."""
    CLUSTER = "cluster"
    """Slurm or Ray alone: hearsay, because it may have lost the node from sight."""
    ENGINE = "engine"
    """The engine's records, with whatever proof they rest on."""
    LEASES = "leases"
    """The control plane's own clock: how long the supervisor has not renewed."""
    OPERATOR = "operator"


class Silence(StrEnum):
    """What the silence of a task means."""

    BROKEN = "this is a sign of life, and the fence counts from now"
    COUNTS = "after the fence and its margin the task is fenced"
    CANCELS = "after the fence and its margin the engine has to cancel the task"
    """That is no end: a supervisor that hangs before it begins knows no fence."""
    PROVES_NOTHING = "no fence passes, because there may be no supervisor to keep it"
    OVER = "the task has ended"


class End(StrEnum):
    """Whether the end of the task may be recorded. Only then may another task take its place, or the attempt
    end and free its devices. What can change meanwhile is checked in the transaction that records the end.
    """

    NO = "no"
    YES = "yes"
    WHILE_SILENT = "yes, if the node is still silent"
    """`Leases.is_still_fenced`: a frozen supervisor may have renewed its lease since."""
    WHILE_DECLARED = "yes, if the declaration still stands"
    """`is_still_dead`: the operator may have withdrawn it, or a supervisor there may have spoken."""


class Rule(NamedTuple):
    """One row of the table."""

    source: Source
    silence: Silence
    end: End
    stops_attempt: bool = False
    """If no other task could take its place in time, the rest of the attempt is stopped."""
    withdraws: tuple[Evidence, ...] = ()
    """Earlier evidence about the same task that this contradicts."""
    if_early: Evidence | None = None
    """See `Evidence.if_early`. None: the evidence does not depend on that."""

    @property
    def is_hearsay(self) -> bool:
        """Whether no process on the node has spoken."""
        return self.source is Source.CLUSTER


UNSTARTED = (Evidence.QUEUED, Evidence.PENDING)
"""No supervisor has been seen alive."""
PER_CLUSTER = (Evidence.ORPHANED_PER_CLUSTER, Evidence.DOUBTFUL)
"""Doubts that the cluster raised and can withdraw."""
UNSUPERVISED = (Evidence.ORPHANED, *PER_CLUSTER)
"""There may be processes without a supervisor."""

RULES: dict[Evidence, Rule] = {
    Evidence.DOUBTFUL: Rule(Source.CLUSTER, Silence.PROVES_NOTHING, End.NO),
    Evidence.ORPHANED_PER_CLUSTER: Rule(
        Source.CLUSTER, Silence.PROVES_NOTHING, End.NO, stops_attempt=True, if_early=Evidence.DOUBTFUL
    ),
    Evidence.ORPHANED: Rule(Source.NODE, Silence.PROVES_NOTHING, End.NO, stops_attempt=True),
    Evidence.ALIVE: Rule(Source.NODE, Silence.BROKEN, End.NO, withdraws=UNSUPERVISED),
    Evidence.SUSPENDED: Rule(Source.CLUSTER, Silence.BROKEN, End.NO),
    Evidence.QUEUED: Rule(Source.CLUSTER, Silence.BROKEN, End.NO),
    Evidence.PENDING: Rule(Source.ENGINE, Silence.CANCELS, End.NO),
    Evidence.UNKNOWN: Rule(Source.ENGINE, Silence.COUNTS, End.NO),
    Evidence.CLEARED: Rule(
        Source.CLUSTER, Silence.COUNTS, End.NO, withdraws=PER_CLUSTER, if_early=Evidence.UNKNOWN
    ),
    Evidence.FENCED: Rule(Source.LEASES, Silence.OVER, End.WHILE_SILENT),
    Evidence.DECLARED_DEAD: Rule(Source.OPERATOR, Silence.OVER, End.WHILE_DECLARED),
    Evidence.ENDED: Rule(Source.ENGINE, Silence.OVER, End.YES, if_early=Evidence.UNKNOWN),
}
