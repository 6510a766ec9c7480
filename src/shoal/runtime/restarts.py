"""Whether ranks that failed are started anew where they are, and which group of them comes next.

The cheapest way on, tried first and only while it helps: ranks that fail again at once need other nodes, a
pause or a person, which is the control plane's business. The only node of an attempt decides by itself; of
several, the control plane counts the groups, and the first node says where each of them meets.
"""

from __future__ import annotations

import msgspec

from shoal.runtime.ending import Ending
from shoal.runtime.environment import Generation, first_generation
from shoal.runtime.ports import free_port
from shoal.runtime.renewal import Renewer
from shoal.wire import EndKind, NodeOutcome, Order

LIVED_S = 5.0
MAX_QUICK = 2
"""So many groups in a row may be killed before they ran for that long or made a step: more would not help."""
RANK_FAILED = frozenset({EndKind.EXITED, EndKind.SIGNALED})
OTHERS_FAILED = Ending(kind=EndKind.STOPPED, message="ranks of another node failed")


class Restarts:
    """The groups of ranks of one share. Blocks nowhere: `next` is asked again until it has an answer."""

    def __init__(self, order: Order, renewer: Renewer | None) -> None:
        self._order = order
        self._renewer = renewer
        self._is_alone = len(order.nodes) == 1
        self._failure: NodeOutcome | None = None
        self._quick = 0
        self.generation = first_generation(order)

    def may_follow(self, end: Ending, ran_s: float, *, has_stepped: bool) -> bool:
        """Whether a group that ended so after `ran_s` may be followed by another in the same place.

        `has_stepped`: it is known to have made a step, however short its life was.
        """
        if end is OTHERS_FAILED:
            return True
        is_quick = ran_s < LIVED_S and not has_stepped
        self._quick = self._quick + 1 if is_quick else 0
        if is_quick and self._is_alone and end.kind is EndKind.EXITED:
            # A program that gives up at once gets the pause that its retries have. On one of several nodes
            # it may only have noticed that a rank of another was killed.
            return False
        # Of several nodes the control plane counts: a group that follows a lost share costs no retry.
        left = self._order.max_restarts - (self.generation.number if self._is_alone else 0)
        can_ask = self._is_alone or self._renewer is not None
        return end.kind in RANK_FAILED and left > 0 and self._quick <= MAX_QUICK and can_ask

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
