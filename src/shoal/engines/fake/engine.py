"""The fake engine: the engine's operations over a `FakeCluster`, with faults between the two."""

from __future__ import annotations

import msgspec

from shoal.engines.base import LogChunk, Observation, Submission
from shoal.engines.fake.cluster import FakeCluster
from shoal.engines.fake.scenario import NO_FAULT, Fault, Faults, Verb, no_faults
from shoal.engines.fake.task import FakeTask, FakeTaskStage
from shoal.engines.refusal import refuse_malformed
from shoal.errors import EngineUnreachable
from shoal.model.evidence import Evidence
from shoal.model.node import NodeFacts

EVIDENCE = {
    FakeTaskStage.SENT: Evidence.PENDING,
    FakeTaskStage.CLAIMED: Evidence.ALIVE,
    FakeTaskStage.STARTED: Evidence.ALIVE,
    FakeTaskStage.ORPHANED: Evidence.ORPHANED,
    FakeTaskStage.ENDED: Evidence.ENDED,
}


class FakeEngine:
    """One control plane's view of the cluster. To simulate a restart, discard it and create another."""

    name = "fake"
    can_replace_tasks = True

    def __init__(self, cluster: FakeCluster, *, faults: Faults = no_faults) -> None:
        self.cluster = cluster
        self._faults = faults
        self._seen: dict[tuple[str, str], Observation] = {}

    async def submit(self, submission: Submission) -> str:
        fault = self._before(Verb.SUBMIT, submission.attempt_id)
        if submission.attempt_id not in self.cluster.native_ids:
            refuse_malformed(submission, self.cluster.facts)
        for task_spec in self.cluster.missing_task_specs(submission):
            self._check_reachable(task_spec.identity.node)
        native_id = self.cluster.accept(submission, fault.delay_s, is_stillborn=fault.is_stillborn)
        self._after(Verb.SUBMIT, fault)
        return native_id

    async def cancel(self, attempt_id: str, grace_s: float) -> None:
        fault = self._before(Verb.CANCEL, attempt_id)
        self.cluster.stop(attempt_id, grace_s, fault.delay_s)
        for task in self.cluster.tasks(attempt_id):
            if task.stage is not FakeTaskStage.ENDED:
                self._check_reachable(task.task_spec.identity.node)
        self._after(Verb.CANCEL, fault)

    async def list_owned(self) -> list[Observation]:
        fault = self._before(Verb.LIST_OWNED)
        observations = [self._observe(task, is_stale=fault.is_stale) for task in self.cluster.tasks()]
        self._after(Verb.LIST_OWNED, fault)
        return [observation for observation in observations for _ in range(fault.copies)]

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
        self._check_reachable(node)
        log, is_ended = self.cluster.log(attempt_id, node)
        self._after(Verb.READ_LOG, fault)
        offset = min(max(offset, 0), len(log))
        end = min(offset + max(limit, 1), len(log))
        # Whole lines only: back to the last newline, or on to the next if one line exceeds the limit.
        end = log.rfind(b"\n", offset, end) + 1 or log.find(b"\n", end) + 1 or len(log)
        is_complete = is_ended and end == len(log)
        return LogChunk(data=log[offset:end], next_offset=end, size=len(log), is_complete=is_complete)

    async def close(self) -> None:
        """Nothing to release."""

    def _observe(self, task: FakeTask, *, is_stale: bool) -> Observation:
        task_spec = task.task_spec
        key = (task_spec.identity.attempt_id, task_spec.identity.node)
        if is_stale and key in self._seen:
            return self._seen[key]
        observation = Observation(
            attempt_id=task_spec.identity.attempt_id,
            epoch=task_spec.identity.epoch,
            node=task_spec.identity.node,
            native_id=task.native_id,
            evidence=EVIDENCE[task.stage],
            replacement=task_spec.identity.replacement,
            started_at=task.started_at,
            outcome=task.outcome,
            raw=task.stage.name.lower(),
        )
        if self.cluster.is_cut(task_spec.identity.node):
            observation = msgspec.structs.replace(
                observation,
                evidence=self._evidence_when_cut(task),
                started_at=None,
                outcome=None,
                raw="cut off",
            )
        self._seen[key] = observation
        return observation

    def _evidence_when_cut(self, task: FakeTask) -> Evidence:
        if task.task_spec.identity.node in self.cluster.doubtful_nodes:
            return Evidence.DOUBTFUL
        return Evidence.UNKNOWN if task.stage is FakeTaskStage.ORPHANED else Evidence.CLEARED

    def _check_reachable(self, node: str) -> None:
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
