"""The fake cluster itself: what really happens, whoever looks.

It outlives the `FakeEngine` objects that talk to it, as a real cluster outlives a control plane. Tests
and simulations cut, power off and strike it here, and read here what is true.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shoal.clock import Clock
from shoal.engines.base import Submission
from shoal.engines.fake.script import Act, Script, always
from shoal.engines.fake.share import NEVER, Share, Stage
from shoal.model.node import NodeFacts
from shoal.wire import EndKind, Order, Renewal, RenewalAnswer


class SentRenewal(msgspec.Struct, frozen=True, kw_only=True):
    """A renewal on its way. Whoever carries it may lose, delay or repeat it."""

    renewal: Renewal
    sent_at: float


class FakeCluster:
    """Nodes, and the shares on them. `settle` brings it up to the clock; every other verb settles first."""

    def __init__(self, nodes: Iterable[NodeFacts], *, clock: Clock, script: Script | None = None) -> None:
        self.clock = clock
        self.script = script or always(Act())
        self.facts = {facts.name: facts for facts in nodes}
        self.native_ids: dict[str, str] = {}
        """Every attempt ever taken, forgotten ones too."""
        self._shares: dict[tuple[str, str], Share] = {}
        self._nodes_of: dict[str, tuple[str, ...]] = {}
        self._awake: dict[tuple[str, str], Share] = {}
        """Those that may do something by themselves: what ended long ago costs nothing."""
        self._quiet_until = NEVER
        """Before this moment nobody enters another stage by itself."""
        self._kept: dict[tuple[str, str], Share] = {}
        self._cut: set[str] = set()
        self._off: set[str] = set()
        self.doubted: set[str] = set()
        """Nodes where something does not die, and nobody knows whose: what is cut off there is in doubt."""

    def settle(self) -> None:
        """Let everything happen that is due by now, each share by itself."""
        now, ahead = self._times()
        if now < self._quiet_until:
            return
        for share in self._awake.values():
            share.live_until(now, ahead)
        self._quiet_until = min((share.changes_at() for share in self._awake.values()), default=NEVER)

    def next_event_at(self) -> float | None:
        """The next monotonic reading at which a share does something by itself, or None."""
        at = min((share.next_at() for share in self._awake.values()), default=NEVER)
        return None if at == NEVER else at

    def running(self) -> list[Order]:
        """The truth: shares whose supervisor or ranks live now, seen or not."""
        self.settle()
        return [s.order for s in self._shares.values() if Stage.SENT < s.stage < Stage.ENDED]

    def take(self, submission: Submission, delay_s: float = 0.0, *, is_stillborn: bool = False) -> str:
        """Send every order to its node, once; what is sent again only wakes shares that nobody claimed."""
        self.settle()
        known = self.native_ids.get(submission.attempt_id)
        if known is not None:
            for share in self._told(submission.attempt_id):
                share.send_again(self.clock.monotonic() + delay_s)
        native_id = known or f"fake-{len(self.native_ids) + 1}"
        lacking = self.lacking(submission)
        self.native_ids[submission.attempt_id] = native_id
        names = (*self._nodes_of.get(submission.attempt_id, ()), *(order.node for order in lacking))
        self._nodes_of[submission.attempt_id] = tuple(dict.fromkeys(names))
        now, ahead = self._times()
        for order in lacking:
            share = Share(order, self.script(order), native_id, NEVER if is_stillborn else now + delay_s)
            key = order.attempt_id, order.node
            self._shares[key] = self._awake[key] = share
            if order.node in self._off:
                share.end(now, ahead, share.lost(now + ahead, f"node {order.node} is powered off"))
            share.live_until(now, ahead)
            self._quiet_until = min(self._quiet_until, share.changes_at())
        return native_id

    def lacking(self, submission: Submission) -> list[Order]:
        """Its orders of which there is no share: all of a new attempt, and of a known one those in place of
        lost ones. One that is to be replaced and has not ended keeps its place.
        """
        if submission.attempt_id not in self.native_ids:
            return list(submission.orders)
        self.settle()
        found = [order for order in submission.orders if order.incarnation > 0]
        shares = {share.order.node: share for share in self.shares(submission.attempt_id)}
        return [order for order in found if _can_begin(order, shares.get(order.node))]

    def shares(self, attempt_id: str | None = None) -> list[Share]:
        """Shares not forgotten, oldest first."""
        self.settle()
        if attempt_id is None:
            return list(self._shares.values())
        keys = [(attempt_id, node) for node in self._nodes_of.get(attempt_id, ())]
        return [self._shares[key] for key in keys if key in self._shares]

    def stop(self, attempt_id: str, grace_s: float, delay_s: float = 0.0) -> None:
        """Reaches the shares on nodes that are not cut off."""
        now = self.clock.monotonic()
        for share in self._told(attempt_id):
            if share.order.node not in self._cut:
                share.stop(now + delay_s, grace_s)
        self.settle()

    def forget(self, attempt_id: str) -> None:
        """Keeps it when anything of it may still run."""
        shares = self.shares(attempt_id)
        if all(share.stage is Stage.ENDED for share in shares):
            for share in shares:
                key = (attempt_id, share.order.node)
                self._kept[key] = self._shares.pop(key)
                self._awake.pop(key, None)

    def log(self, attempt_id: str, node: str) -> tuple[bytes, bool]:
        """The log so far, and whether it is complete."""
        self.settle()
        share = self._shares.get((attempt_id, node)) or self._kept.get((attempt_id, node))
        return (share.log, share.stage is Stage.ENDED) if share else (b"", True)

    # What happens to nodes and shares from outside.

    def cut(self, node: str) -> None:
        """Partition a node off: what runs there runs on, unseen, and its renewals are lost."""
        self.settle()
        self._cut.add(node)

    def heal(self, node: str) -> None:
        self.settle()
        self._cut.discard(node)

    def is_cut(self, node: str) -> bool:
        return node in self._cut

    def power_off(self, node: str) -> None:
        """Everything on the node is gone, and the engine knows that it is."""
        self._off.add(node)
        for share in self.shares():
            if share.order.node == node:
                self._lose(share, f"node {node} was powered off")

    def power_on(self, node: str) -> None:
        self.settle()
        self._off.discard(node)

    def is_off(self, node: str) -> bool:
        return node in self._off

    def kill_supervisor(self, attempt_id: str, node: str) -> None:
        """The supervisor dies without a word and its ranks with it; a share already over stays as it is."""
        for share in self.shares(attempt_id):
            if share.order.node == node and share.stage is not Stage.SENT:
                self._lose(share, "its supervisor is gone")

    def orphan(self, attempt_id: str, node: str, lives_s: float) -> None:
        """The supervisor dies and its ranks do not, for so long; said again, for so long from now on."""
        for share in self._told(attempt_id):
            if share.order.node == node and share.stage in (Stage.STARTED, Stage.ORPHANED):
                share.orphan(self.clock.monotonic() + lives_s)

    def kill_rank(self, attempt_id: str, node: str, signal: int = 9) -> None:
        """A rank dies by a signal that is not ours, and its supervisor says so."""
        now, ahead = self._times()
        for share in self.shares(attempt_id):
            if share.order.node == node and share.stage is Stage.STARTED:
                rank = share.order.node_rank * share.order.ranks_per_node
                told = share.lost(now + ahead, f"rank {rank} got signal {signal}")
                told = msgspec.structs.replace(told, kind=EndKind.SIGNALED, signal=signal, rank=rank)
                if share.can_regroup:
                    share.fail(now, told)
                else:
                    share.end(now, ahead, told)

    # The lease, carried by whoever simulates the network.

    def renewals(self) -> list[SentRenewal]:
        """Renewals the supervisors send now; those of cut-off nodes are lost on the way."""
        self.settle()
        now = self.clock.monotonic()
        sent = []
        for key in [key for key, share in self._awake.items() if share.is_asleep]:
            del self._awake[key]
        for share in self._awake.values():
            renewal = share.renewal(now)
            if renewal is not None and share.order.node not in self._cut:
                sent.append(SentRenewal(renewal=renewal, sent_at=now))
        return sent

    def answer(self, sent: SentRenewal, answer: RenewalAnswer) -> None:
        """The control plane's answer reaches the supervisor, unless its node is cut off."""
        share = self._asker(sent)
        if share is not None:
            share.renewed(sent.sent_at)
            share.regroup(sent.renewal, answer, *self._times())
            if answer.should_stop:
                share.stop(self.clock.monotonic(), answer.grace_s)
                self._wake()
                self.settle()

    def reject(self, sent: SentRenewal) -> None:
        """The control plane calls the attempt stale: it fences itself at once."""
        share = self._asker(sent)
        if share is not None:
            share.renewed(sent.sent_at)
            share.fence(self.clock.monotonic())
            self._wake()
            self.settle()

    def _told(self, attempt_id: str) -> list[Share]:
        """Its shares, which are about to be told something: none of them is quiet from now on."""
        shares = self.shares(attempt_id)
        self._wake()
        return shares

    def _wake(self) -> None:
        self._quiet_until = -NEVER

    def _asker(self, sent: SentRenewal) -> Share | None:
        self.settle()
        node = sent.renewal.node
        share = None if node in self._cut else self._shares.get((sent.renewal.attempt_id, node))
        # An answer to a share that was replaced meanwhile reaches nobody.
        return share if share and share.order.incarnation == sent.renewal.incarnation else None

    def _lose(self, share: Share, message: str) -> None:
        now, ahead = self._times()
        share.end(now, ahead, share.lost(now + ahead, message))

    def _times(self) -> tuple[float, float]:
        """The monotonic reading, and what turns one into a date."""
        now = self.clock.monotonic()
        return now, self.clock.now() - now


def _can_begin(order: Order, share: Share | None) -> bool:
    if share is None:
        return True
    return share.stage is Stage.ENDED and share.order.incarnation < order.incarnation
