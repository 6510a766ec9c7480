"""Whether ranks that failed are started again in place, and which group of them comes next.

That is the cheapest way on, and it helps only where a restart does. A program that ends by itself soon after
its start needs a pause and a person to look, and ranks that are killed at once need other nodes. The only
node of an attempt decides by itself. Of several nodes the control plane decides, because a rank that exits
may only have lost a peer on another node; and the first node says where each group meets.
"""

from __future__ import annotations

import signal

import msgspec

from shoal.runtime.ending import Ending
from shoal.runtime.environment import Generation, first_generation
from shoal.runtime.ports import free_port
from shoal.runtime.renewal import Renewer
from shoal.wire import MAX_EARLY, EndKind, NodeOutcome, Order

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
    """The groups of ranks of one share. Blocks nowhere: `next` is asked again until it has an answer."""

    def __init__(self, order: Order, renewer: Renewer | None) -> None:
        self._order = order
        self._renewer = renewer
        self._is_alone = len(order.nodes) == 1
        self._failure: NodeOutcome | None = None
        self.num_early = 0
        """How many groups in a row ended within `LIVED_S`, whichever node's ranks failed first."""
        self.gives_up = False
        """Whether the group that just ended did so by itself, and too soon."""
        self.generation = first_generation(order)

    def may_follow(self, end: Ending, ran_s: float, *, has_stepped: bool) -> bool:
        """Whether a group that ended so after `ran_s` may be followed by another in the same place.

        `has_stepped`: it is known to have made a step, however short its life was. Of several nodes the
        control plane has the last word, by what is noted here.
        """
        is_early = ran_s < LIVED_S and not has_stepped
        self.num_early = self.num_early + 1 if is_early else 0
        self.gives_up = _is_by_itself(end) and ran_s < self._least_life_s and not has_stepped
        if end is OTHERS_FAILED:
            return True
        if self._is_alone and (self.gives_up or self.num_early > MAX_EARLY):
            return False
        # Of several nodes the control plane counts: a group that follows a lost share costs no retry.
        left = self._order.max_restarts - (self.generation.number if self._is_alone else 0)
        can_ask = self._is_alone or self._renewer is not None
        return end.kind in RANK_FAILED and left > 0 and can_ask

    @property
    def _least_life_s(self) -> float:
        """How long a group must live that ends by itself, to be started again in place."""
        is_first = self._order.epoch == 1 and self.generation.number == first_generation(self._order).number
        return LIVED_S if is_first else LIVED_AGAIN_S

    @staticmethod
    def excluded(end: Ending) -> Ending:
        """How a group ends here that a log rule spoke about: other nodes may go on, this one does not."""
        if end is not OTHERS_FAILED:
            return end
        told = "ranks of another node failed, and a log rule has spoken about this one"
        return msgspec.structs.replace(end, message=told)

    @property
    def is_wanted(self) -> bool:
        """Whether the control plane has begun another group: ranks of another node failed."""
        return self._renewer is not None and self._renewer.group.generation > self.generation.number

    @property
    def is_after_hang(self) -> bool:
        """Whether that is because they hung."""
        return self.is_wanted and self._renewer is not None and self._renewer.group.is_after_hang

    def begin(self, failure: NodeOutcome | None) -> None:
        """Our group is cleared away. `failure`: how it ended here; None: elsewhere."""
        self._failure = failure
        if self._renewer is not None and failure is not None and not self._is_alone:
            self._renewer.tell_generation(failure=failure)

    def next(self, failure: NodeOutcome | None) -> Generation | None:
        """The group to start now; None: not known yet. `is_refused` says when there will be none."""
        if self._is_alone:
            return self._enter(self.generation.number + 1, self._own_port(), failure)
        assert self._renewer is not None
        group = self._renewer.group
        if group.generation <= self.generation.number:
            return None
        if self._order.node_rank == 0:
            return self._enter(group.generation, self._own_port())
        return None if group.master_port is None else self._enter(group.generation, group.master_port)

    @property
    def is_refused(self) -> bool:
        """Whether the control plane heard of our failure and has begun no other group."""
        if self._renewer is None or self._failure is None:
            return False
        return self._renewer.answered_failure is self._failure and not self.is_wanted

    def _own_port(self) -> int:
        return free_port(self._order.master_addr, self.generation.master_port)

    def _enter(self, number: int, port: int, failure: NodeOutcome | None = None) -> Generation:
        self.generation = Generation(number=number, master_port=port)
        if self._renewer is not None:
            self._renewer.tell_generation(self.generation, failure)
        return self.generation


def _is_by_itself(end: Ending) -> bool:
    return end.kind is EndKind.EXITED or (end.kind is EndKind.SIGNALED and end.signal in OWN_FAULTS)
