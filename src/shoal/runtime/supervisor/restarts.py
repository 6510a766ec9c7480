"""Decide whether ranks that failed start again in place, and which rendezvous round comes next.

A restart in place is the cheapest way on, but it helps only some failures. A program that ends by itself soon
after its start needs a pause and a person to look at it, and ranks that are killed at once need other nodes.
The only node of an attempt decides by itself. Of several nodes the control plane decides, because a rank that
exits may only have lost a peer on another node. The first node says where each group meets.
"""

from __future__ import annotations

import signal

import msgspec

from shoal.runtime.lease.renewal import LeaseRenewer
from shoal.runtime.process.network import free_port
from shoal.runtime.supervisor.endings import Ending
from shoal.runtime.supervisor.environment import RendezvousRound, first_rendezvous
from shoal.wire import MAX_EARLY_ENDS, EndKind, TaskIdentity, TaskOutcome, TaskRanks

LIVED_S = 5.0
"""A first group of ranks that ends by itself within this time is not started again in place."""
LIVED_AGAIN_S = 60.0
"""The same for a group that follows a failure, in this attempt or in an earlier one."""
OWN_FAULTS = frozenset(
    {
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGSEGV,
        signal.SIGSYS,
        signal.SIGTRAP,
    }
)
"""Signals by which a program ends itself."""
RANK_FAILED = frozenset({EndKind.EXITED, EndKind.SIGNALED})
OTHERS_FAILED = Ending(kind=EndKind.STOPPED, message="ranks of another node failed")


class Restarts:
    """The rank groups of one task. Nothing here blocks: ask `next` again until it has an answer."""

    def __init__(self, identity: TaskIdentity, ranks: TaskRanks, renewer: LeaseRenewer | None) -> None:
        self._ranks = ranks
        self._renewer = renewer
        self._is_alone = len(ranks.nodes) == 1
        self._failure: TaskOutcome | None = None
        self.num_early = 0
        """How many groups in a row ended within `LIVED_S`, whichever node's ranks failed first."""
        self.gives_up = False
        """Whether the group that just ended did so by itself, and too soon."""
        self.rendezvous = first_rendezvous(identity.replacement, ranks.master_port)
        self._first_round = self.rendezvous.number
        self._is_first_attempt = identity.epoch == 1

    def may_follow(self, end: Ending, ran_s: float, *, has_stepped: bool) -> bool:
        """Whether another group may follow in place after this ending, `ran_s` after the group's start.

        `has_stepped`: the group made a step, however short its life was. With several nodes, the control
        plane decides, and uses what is noted here.
        """
        is_early = ran_s < LIVED_S and not has_stepped
        self.num_early = self.num_early + 1 if is_early else 0
        self.gives_up = _is_by_itself(end) and ran_s < self._least_life_s and not has_stepped
        if end is OTHERS_FAILED:
            return True
        if self._is_alone and (self.gives_up or self.num_early > MAX_EARLY_ENDS):
            return False
        # With several nodes the control plane counts, because a group after a lost task costs no retry.
        left = self._ranks.max_restarts - (self.rendezvous.number if self._is_alone else 0)
        can_ask = self._is_alone or self._renewer is not None
        return end.kind in RANK_FAILED and left > 0 and can_ask

    @property
    def _least_life_s(self) -> float:
        """How long a group must live before its own end may be followed by a start in place."""
        is_first = self._is_first_attempt and self.rendezvous.number == self._first_round
        return LIVED_S if is_first else LIVED_AGAIN_S

    @staticmethod
    def excluded(end: Ending) -> Ending:
        """Return the ending here for a group that a log rule excludes: other nodes may go on, this
        one not.
        """
        if end is not OTHERS_FAILED:
            return end
        message = "ranks of another node failed, and a log rule has spoken about this one"
        return msgspec.structs.replace(end, message=message)

    @property
    def is_wanted(self) -> bool:
        """Whether the control plane has begun another group, because ranks of another node failed."""
        return (
            self._renewer is not None and self._renewer.newest_group.rendezvous_round > self.rendezvous.number
        )

    @property
    def is_after_hang(self) -> bool:
        """Whether that group follows a hang."""
        return self.is_wanted and self._renewer is not None and self._renewer.newest_group.is_after_hang

    def begin(self, failure: TaskOutcome | None) -> None:
        """Report that our group is cleared away. `failure`: how it ended here; None: elsewhere."""
        self._failure = failure
        if self._renewer is not None and failure is not None and not self._is_alone:
            self._renewer.report_rendezvous(failure=failure)

    def next(self, failure: TaskOutcome | None) -> RendezvousRound | None:
        """Return the group to start now. None: not known so far. `is_refused` says if there will be none."""
        if self._is_alone:
            return self._enter(self.rendezvous.number + 1, self._own_port(), failure)
        assert self._renewer is not None
        group = self._renewer.newest_group
        if group.rendezvous_round <= self.rendezvous.number:
            return None
        if self._ranks.node_rank == 0:
            return self._enter(group.rendezvous_round, self._own_port())
        return None if group.master_port is None else self._enter(group.rendezvous_round, group.master_port)

    @property
    def is_refused(self) -> bool:
        """Whether the control plane knows of our failure and has begun no other group."""
        if self._renewer is None or self._failure is None:
            return False
        return self._renewer.acknowledged_failure is self._failure and not self.is_wanted

    def _own_port(self) -> int:
        return free_port(self._ranks.master_addr, self.rendezvous.master_port)

    def _enter(self, number: int, port: int, failure: TaskOutcome | None = None) -> RendezvousRound:
        self.rendezvous = RendezvousRound(number=number, master_port=port)
        if self._renewer is not None:
            self._renewer.report_rendezvous(self.rendezvous, failure)
        return self.rendezvous


def _is_by_itself(end: Ending) -> bool:
    return end.kind is EndKind.EXITED or (end.kind is EndKind.SIGNALED and end.signal in OWN_FAULTS)
