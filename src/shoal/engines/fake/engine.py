"""The fake engine: the seven verbs over a `FakeCluster`, with faults between the two."""

from __future__ import annotations

import msgspec

from shoal.engines.base import LogChunk, Observation, Sight, Submission
from shoal.engines.fake.cluster import FakeCluster
from shoal.engines.fake.faults import NO_FAULT, Fault, Faults, Verb, no_faults
from shoal.engines.fake.share import Share, Stage
from shoal.engines.refusal import refuse_malformed
from shoal.errors import EngineUnreachable
from shoal.model.node import NodeFacts

SIGHTS = {
    Stage.SENT: Sight.PENDING,
    Stage.CLAIMED: Sight.ALIVE,
    Stage.STARTED: Sight.ALIVE,
    Stage.ORPHANED: Sight.ORPHANED,
    Stage.ENDED: Sight.ENDED,
}


class FakeEngine:
    """One control plane's view. Throw it away and make another to simulate a restart."""

    name = "fake"
    can_replace_shares = True

    def __init__(self, cluster: FakeCluster, *, faults: Faults = no_faults) -> None:
        self.cluster = cluster
        self._faults = faults
        self._seen: dict[tuple[str, str], Observation] = {}

    async def submit(self, submission: Submission) -> str:
        fault = self._before(Verb.SUBMIT, submission.attempt_id)
        if submission.attempt_id not in self.cluster.native_ids:
            refuse_malformed(submission, self.cluster.facts)
        for order in self.cluster.lacking(submission):
            self._reach(order.node)
        native_id = self.cluster.take(submission, fault.delay_s, is_stillborn=fault.is_stillborn)
        self._after(Verb.SUBMIT, fault)
        return native_id

    async def cancel(self, attempt_id: str, grace_s: float) -> None:
        fault = self._before(Verb.CANCEL, attempt_id)
        self.cluster.stop(attempt_id, grace_s, fault.delay_s)
        for share in self.cluster.shares(attempt_id):
            if share.stage is not Stage.ENDED:
                self._reach(share.order.node)
        self._after(Verb.CANCEL, fault)

    async def list_owned(self) -> list[Observation]:
        fault = self._before(Verb.LIST_OWNED)
        seen = [self._look(share, is_stale=fault.is_stale) for share in self.cluster.shares()]
        self._after(Verb.LIST_OWNED, fault)
        return [observation for observation in seen for _ in range(fault.copies)]

    async def forget(self, attempt_id: str) -> None:
        fault = self._before(Verb.FORGET, attempt_id)
        self.cluster.forget(attempt_id)
        self._after(Verb.FORGET, fault)

    async def nodes(self) -> list[NodeFacts]:
        fault = self._before(Verb.NODES)
        facts = [
            msgspec.structs.replace(
                node,
                is_alive=node.is_alive
                and not (self.cluster.is_cut(node.name) or self.cluster.is_off(node.name)),
            )
            for node in self.cluster.facts.values()
        ]
        self._after(Verb.NODES, fault)
        return facts

    async def read_log(self, attempt_id: str, node: str, offset: int, limit: int) -> LogChunk:
        fault = self._before(Verb.READ_LOG, attempt_id)
        self._reach(node)
        log, is_ended = self.cluster.log(attempt_id, node)
        self._after(Verb.READ_LOG, fault)
        offset = min(max(offset, 0), len(log))
        end = min(offset + max(limit, 1), len(log))
        # Whole lines only: back to the last newline, or on to the next where one line exceeds the limit.
        end = log.rfind(b"\n", offset, end) + 1 or log.find(b"\n", end) + 1 or len(log)
        is_complete = is_ended and end == len(log)
        return LogChunk(data=log[offset:end], next_offset=end, size=len(log), is_complete=is_complete)

    async def close(self) -> None:
        """Nothing to let go of."""

    def _look(self, share: Share, *, is_stale: bool) -> Observation:
        order = share.order
        key = (order.attempt_id, order.node)
        if is_stale and key in self._seen:
            return self._seen[key]
        seen = Observation(
            attempt_id=order.attempt_id,
            epoch=order.epoch,
            node=order.node,
            native_id=share.native_id,
            sight=SIGHTS[share.stage],
            incarnation=order.incarnation,
            started_at=share.started_at,
            outcome=share.outcome,
            raw=share.stage.name.lower(),
        )
        if self.cluster.is_cut(order.node):
            is_doubtful = order.node in self.cluster.doubted
            seen = msgspec.structs.replace(
                seen,
                sight=Sight.DOUBTFUL if is_doubtful else Sight.UNKNOWN,
                is_hearsay=is_doubtful,
                is_cleared=not is_doubtful and share.stage is not Stage.ORPHANED,
                started_at=None,
                outcome=None,
                raw="cut off",
            )
        self._seen[key] = seen
        return seen

    def _reach(self, node: str) -> None:
        if self.cluster.is_cut(node):
            raise EngineUnreachable(f"node {node} does not answer", hint="shoal nodes", node=node)

    def _before(self, verb: Verb, attempt_id: str | None = None) -> Fault:
        fault = self._faults(verb, attempt_id)
        if fault.is_lost_before:
            raise EngineUnreachable(f"{verb}: no connection to the fake cluster", hint="shoal status")
        return fault

    def _after(self, verb: Verb, fault: Fault) -> None:
        if fault is not NO_FAULT and fault.is_lost_after:
            raise EngineUnreachable(f"{verb}: the fake cluster's answer was lost", hint="shoal status")
