"""What is seen of the shares at a desk: by what their keepers said, and else by what the cluster says.

Counts how long who is silent has been, and who is left behind by others. Ends at the desk what is known to be
over, or can begin nowhere; asks no cluster, and starts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import msgspec

from shoal.clock import Clock
from shoal.engines.base import Observation, Sight
from shoal.engines.desk import Desk, DeskShare
from shoal.engines.glimpses import Glimpse, Glimpses, Stage
from shoal.model.node import NodeFacts
from shoal.wire import KEEPER_ASK_S, KEEPER_PATIENCE_S, KEEPER_PING_S, EndKind, Order

LATE_S = KEEPER_PING_S + 2 * KEEPER_ASK_S
"""How long a keeper may be quiet before the cluster's evidence of its end counts: one that lives may ask two
control planes in vain before it comes to us. Who speaks contradicts it."""
HEARD_S = LATE_S + 2.0
"""Who has said something so lately lives."""
SILENT_S = 3 * HEARD_S
"""A node that nobody was heard from for so long takes no work. Less than the shortest fence: what is replaced
because its node is silent goes elsewhere."""
UNHEARD = f"what runs there was not heard from for {SILENT_S:.0f} s"
BEHIND_S = KEEPER_PATIENCE_S + 60.0
"""How long a share may wait for its keeper while the cluster runs what it was started with, and others of it
have their orders. By then its keeper has given up; one that comes yet is late, and gets no order."""
REPLACED = "nothing was heard from it, and another share has its place"


class Sightings:
    """One per engine. What is counted is only in memory: made anew, nobody has been silent before.

    What finds an end writes it down, and blocks.
    """

    def __init__(self, desk: Desk, clock: Clock, native_id: Callable[[str], str]) -> None:
        """`native_id`: the engine's own, of an attempt."""
        self._desk = desk
        self._clock = clock
        self._native_id = native_id
        self._opened_at = clock.monotonic()
        self._looked_at = math.inf
        """Monotonic: when this process first looked at what runs. Who lived before may speak yet."""
        self._suspended: set[tuple[str, str]] = set()
        """Attempts and nodes of shares that were so when they were looked at last."""
        self._behind: dict[tuple[str, str, int], float] = {}
        """By attempt, node and incarnation: since when nobody came for an order while others have theirs."""

    def forget(self, attempt_id: str) -> None:
        """The desk has forgotten it."""
        self._behind = {key: at for key, at in self._behind.items() if key[0] != attempt_id}

    def is_deaf(self, share: DeskShare) -> bool:
        """Nobody was heard from it for longer than one that lives is quiet."""
        heard_at = self._opened_at if share.heard_at is None else share.heard_at
        return share.outcome is None and self._clock.monotonic() - heard_at >= HEARD_S

    def reached(self, nodes: Collection[NodeFacts]) -> list[NodeFacts]:
        """As the cluster lists them; those that cannot be reached from here are not alive. A cluster may take
        minutes to notice a cut, and may not be cut off itself. What is suspended is silent, and says nothing.
        """
        silent = self._silent_nodes()
        return [_unreached(facts) if facts.name in silent else facts for facts in nodes]

    def _silent_nodes(self) -> set[str]:
        now, silences = self._clock.monotonic(), dict[str, float]()
        for share in self._desk.shares():
            if share.outcome is None and share.taken is not None and share.place not in self._suspended:
                heard_at = self._opened_at if share.heard_at is None else share.heard_at
                node = share.order.node
                silences[node] = min(silences.get(node, now - heard_at), now - heard_at)
        return {node for node, silence_s in silences.items() if silence_s >= SILENT_S}

    def observe(self, shares: Collection[DeskShare], seen: Glimpses, unseen: Glimpse) -> list[Observation]:
        """Those that somebody has first: a node is not silent whose silent share is known to be over."""
        self._looked_at = min(self._looked_at, self._clock.monotonic())
        begun = {
            share.place: self._seen(share, seen.get(share.place, unseen))
            for share in shares
            if not share.is_waiting
        }
        self._take_back_stranded(shares, seen, unseen)
        return [
            begun.get(share.place) or self._seen(share, seen.get(share.place, unseen)) for share in shares
        ]

    def end_replaced(self, shares: Collection[DeskShare]) -> None:
        """A share whose place another node has got was replaced on evidence, or after its fence. Nobody will
        write its end, and silent without one it would keep its node from work while the attempt goes on.
        """
        newest = dict[str, Order]()
        for share in sorted(shares, key=lambda share: share.order.incarnation):
            newest[share.order.attempt_id] = share.order
        for share in shares:
            if share.outcome is None and share.order.node not in newest[share.order.attempt_id].nodes:
                is_closed = self._desk.close(share, EndKind.LOST, REPLACED)
                if not is_closed and self.is_deaf(share):
                    self._desk.bury(share, EndKind.LOST, REPLACED)

    def _take_back_stranded(self, shares: Collection[DeskShare], seen: Glimpses, unseen: Glimpse) -> None:
        """What waits for a node that takes no work, or was to begin where nobody is heard from, is lost
        before it began, and may be placed elsewhere. Whom the cluster starts at this very moment either has
        an order by then, and nothing is taken back, or gets none.
        """
        silent = self._silent_nodes()
        for share in (share for share in shares if share.is_waiting):
            glimpse, node = seen.get(share.place, unseen), share.order.node
            # One that is still in the cluster's queue may be there for longer than the node is silent.
            is_cut_off = node in silent and glimpse.stage not in (Stage.QUEUED, Stage.AWAY)
            if glimpse.stranded or is_cut_off:
                told = f"{glimpse.stranded or f'`{node}`: {UNHEARD}'}; {glimpse.raw}"
                told = f"taken back before it began: {told}"
                self._desk.close_unbegun(share.order.attempt_id, share.launch, EndKind.LOST, told)

    def _seen(self, share: DeskShare, glimpse: Glimpse) -> Observation:
        """One share, by what its keeper said, and else by what the cluster says."""
        now = self._clock.monotonic()
        silence_s = now - (min(self._looked_at, now) if share.heard_at is None else share.heard_at)
        if share.outcome is None and share.taken is not None and glimpse.is_over and silence_s >= LATE_S:
            self._desk.bury(share, EndKind.LOST, f"its supervisor is gone: {glimpse.raw}")
        behind_s = self._behind_s(share, glimpse)
        raw = f"{glimpse.raw}; others of it have begun, and nobody has come for this order"
        if behind_s >= BEHIND_S:
            self._desk.close(share, EndKind.LOST, f"{raw} in {BEHIND_S:.0f} s")
        if share.outcome is not None:
            return self._observation(share, Sight.ENDED, share.outcome.kind)
        if share.is_waiting:
            is_queued = glimpse.stage in (Stage.QUEUED, Stage.AWAY)
            raw = raw if behind_s >= HEARD_S else glimpse.raw
            return self._observation(share, Sight.PENDING, raw, is_queued=is_queued)
        is_heard = share.heard_at is not None and silence_s < HEARD_S
        if glimpse.stage is Stage.SUSPENDED:
            self._suspended.add(share.place)
        else:
            self._suspended.discard(share.place)
        if share.left:
            return self._observation(share, Sight.ORPHANED, share.left)
        if is_heard:
            return self._observation(share, Sight.ALIVE, "its keeper speaks", silent_s=silence_s)
        if glimpse.stage is Stage.SUSPENDED:
            return self._observation(share, Sight.ALIVE, glimpse.raw, is_hearsay=True)
        is_late = silence_s >= LATE_S  # else who lived before us may speak yet
        if glimpse.is_left and is_late:
            return self._observation(share, Sight.ORPHANED, glimpse.raw, is_hearsay=True)
        raw = f"its keeper is silent; {glimpse.raw}"
        if glimpse.is_left or glimpse.is_doubtful:
            return self._observation(share, Sight.DOUBTFUL, raw, is_hearsay=True)
        return self._observation(share, Sight.UNKNOWN, raw, is_cleared=glimpse.is_clear and is_late)

    def _behind_s(self, share: DeskShare, glimpse: Glimpse) -> float:
        """For how long it has been left behind by others that the cluster started with it. It may have one
        word for all of them: what it runs for one hides that another's keeper is gone. Or what one waits for
        does not come, and those that began cannot be taken back with it.
        """
        key = (*share.place, share.order.incarnation)
        is_due = glimpse.stage is Stage.RUNNING or bool(glimpse.stranded)
        if not share.is_waiting or not is_due or not self._have_others_begun(share):
            self._behind.pop(key, None)
            return 0.0
        now = self._clock.monotonic()
        return now - self._behind.setdefault(key, now)

    def _have_others_begun(self, share: DeskShare) -> bool:
        return any(
            other.taken is not None and not other.is_closed and other.launch == share.launch
            for other in self._desk.find(share.order.attempt_id).values()
        )

    def _observation(
        self,
        share: DeskShare,
        sight: Sight,
        raw: str,
        *,
        is_queued: bool = False,
        is_hearsay: bool = False,
        is_cleared: bool = False,
        silent_s: float = 0.0,
    ) -> Observation:
        order, outcome = share.order, share.outcome
        return Observation(
            attempt_id=order.attempt_id,
            epoch=order.epoch,
            node=order.node,
            native_id=self._native_id(order.attempt_id),
            sight=sight,
            incarnation=order.incarnation,
            started_at=outcome.started_at if outcome is not None else share.started_at,
            outcome=outcome,
            raw=str(raw),
            is_queued=is_queued,
            is_hearsay=is_hearsay,
            is_cleared=is_cleared,
            silent_s=silent_s,
        )


def _unreached(facts: NodeFacts) -> NodeFacts:
    return msgspec.structs.replace(facts, is_alive=False, closed="", remarks=(*facts.remarks, UNHEARD))
