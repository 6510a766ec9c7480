"""The fake cluster itself: what really happens, whether or not an engine observes it.

It outlives the `FakeEngine` objects that use it, as a real cluster outlives a control plane. Tests and
simulations cut off nodes, power them off and kill processes here, and read the truth here.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shoal.clock import Clock
from shoal.engines.base import Submission
from shoal.engines.fake.scenario import Act, Script, always
from shoal.engines.fake.task import NEVER, FakeTask, FakeTaskStage
from shoal.model.node import NodeFacts
from shoal.wire import EndKind, Renewal, RenewalReply, TaskSpec


class SentRenewal(msgspec.Struct, frozen=True, kw_only=True):
    """A renewal on its way. The simulated network may lose, delay or repeat it."""

    renewal: Renewal
    sent_at: float


class FakeCluster:
    """Nodes and the tasks on them. `settle` brings them up to the clock; every other method settles first."""

    def __init__(self, nodes: Iterable[NodeFacts], *, clock: Clock, script: Script | None = None) -> None:
        self.clock = clock
        self.script = script or always(Act())
        self.facts = {facts.name: facts for facts in nodes}
        self.native_ids: dict[str, str] = {}
        """Every attempt ever accepted, including forgotten ones."""
        self._tasks: dict[tuple[str, str], FakeTask] = {}
        self._nodes_of: dict[str, tuple[str, ...]] = {}
        self._awake: dict[tuple[str, str], FakeTask] = {}
        """Tasks that may still change by themselves, so that tasks that ended long ago cost nothing."""
        self._quiet_until = NEVER
        """Before this moment no task enters another stage by itself."""
        self._forgotten: dict[tuple[str, str], FakeTask] = {}
        self._cut: set[str] = set()
        self._off: set[str] = set()
        self.doubtful_nodes: set[str] = set()
        """Nodes with processes of unknown origin that do not die: a task that is cut off there is
        doubtful."""

    def settle(self) -> None:
        """Let everything happen that is due by now, task by task."""
        now, ahead = self._times()
        if now < self._quiet_until:
            return
        for task in self._awake.values():
            task.live_until(now, ahead)
        self._quiet_until = min((task.changes_at() for task in self._awake.values()), default=NEVER)

    def next_event_at(self) -> float | None:
        """Return the next monotonic time at which a task changes by itself, or None."""
        at = min((task.next_at() for task in self._awake.values()), default=NEVER)
        return None if at == NEVER else at

    def running(self) -> list[TaskSpec]:
        """Return the truth: tasks whose supervisor or ranks live now, observed or not."""
        self.settle()
        return [
            s.task_spec for s in self._tasks.values() if FakeTaskStage.SENT < s.stage < FakeTaskStage.ENDED
        ]

    def accept(self, submission: Submission, delay_s: float = 0.0, *, is_stillborn: bool = False) -> str:
        """Send every task spec to its node, once. Sent again, they only wake tasks that no supervisor
        claimed.
        """
        self.settle()
        known_id = self.native_ids.get(submission.attempt_id)
        if known_id is not None:
            for task in self._tasks_to_change(submission.attempt_id):
                task.send_again(self.clock.monotonic() + delay_s)
        native_id = known_id or f"fake-{len(self.native_ids) + 1}"
        missing = self.missing_task_specs(submission)
        self.native_ids[submission.attempt_id] = native_id
        names = (
            *self._nodes_of.get(submission.attempt_id, ()),
            *(task_spec.identity.node for task_spec in missing),
        )
        self._nodes_of[submission.attempt_id] = tuple(dict.fromkeys(names))
        now, ahead = self._times()
        for task_spec in missing:
            identity = task_spec.identity
            task = FakeTask(
                task_spec, self.script(task_spec), native_id, NEVER if is_stillborn else now + delay_s
            )
            key = identity.attempt_id, identity.node
            self._tasks[key] = self._awake[key] = task
            if identity.node in self._off:
                task.end(
                    now,
                    ahead,
                    task.lost_outcome(now + ahead, f"node {identity.node} is powered off"),
                )
            task.live_until(now, ahead)
            self._quiet_until = min(self._quiet_until, task.changes_at())
        return native_id

    def missing_task_specs(self, submission: Submission) -> list[TaskSpec]:
        """Return the task specs without a task: all of a new attempt, else those that replace a lost task.

        A task that is to be replaced and has not ended keeps its place.
        """
        if submission.attempt_id not in self.native_ids:
            return list(submission.task_specs)
        self.settle()
        replacements = [
            task_spec for task_spec in submission.task_specs if task_spec.identity.replacement > 0
        ]
        tasks = {task.task_spec.identity.node: task for task in self.tasks(submission.attempt_id)}
        return [
            task_spec
            for task_spec in replacements
            if _can_begin(task_spec, tasks.get(task_spec.identity.node))
        ]

    def tasks(self, attempt_id: str | None = None) -> list[FakeTask]:
        """Return tasks that are not forgotten, oldest first."""
        self.settle()
        if attempt_id is None:
            return list(self._tasks.values())
        keys = [(attempt_id, node) for node in self._nodes_of.get(attempt_id, ())]
        return [self._tasks[key] for key in keys if key in self._tasks]

    def stop(self, attempt_id: str, grace_s: float, delay_s: float = 0.0) -> None:
        """Stop the attempt's tasks on nodes that are not cut off."""
        now = self.clock.monotonic()
        for task in self._tasks_to_change(attempt_id):
            if task.task_spec.identity.node not in self._cut:
                task.stop(now + delay_s, grace_s)
        self.settle()

    def forget(self, attempt_id: str) -> None:
        """Forget the attempt, unless a task of it may still run."""
        tasks = self.tasks(attempt_id)
        if all(task.stage is FakeTaskStage.ENDED for task in tasks):
            for task in tasks:
                key = (attempt_id, task.task_spec.identity.node)
                self._forgotten[key] = self._tasks.pop(key)
                self._awake.pop(key, None)

    def log(self, attempt_id: str, node: str) -> tuple[bytes, bool]:
        """Return the log so far, and whether it is complete."""
        self.settle()
        task = self._tasks.get((attempt_id, node)) or self._forgotten.get((attempt_id, node))
        return (task.log, task.stage is FakeTaskStage.ENDED) if task else (b"", True)

    # Faults of nodes and tasks.

    def cut(self, node: str) -> None:
        """Cut a node off: its tasks keep running unobserved, and their renewals are lost."""
        self.settle()
        self._cut.add(node)

    def heal(self, node: str) -> None:
        self.settle()
        self._cut.discard(node)

    def is_cut(self, node: str) -> bool:
        return node in self._cut

    def power_off(self, node: str) -> None:
        """End everything on the node, so that the engine knows of it."""
        self._off.add(node)
        for task in self.tasks():
            if task.task_spec.identity.node == node:
                self._lose(task, f"node {node} was powered off")

    def power_on(self, node: str) -> None:
        self.settle()
        self._off.discard(node)

    def is_off(self, node: str) -> bool:
        return node in self._off

    def kill_supervisor(self, attempt_id: str, node: str) -> None:
        """Kill the supervisor without an outcome, and its ranks. A task that is over stays as it is."""
        for task in self.tasks(attempt_id):
            if task.task_spec.identity.node == node and task.stage is not FakeTaskStage.SENT:
                self._lose(task, "its supervisor is gone")

    def orphan(self, attempt_id: str, node: str, lives_s: float) -> None:
        """Kill the supervisor but not its ranks, which live `lives_s` longer. A repeated call restarts that
        time.
        """
        for task in self._tasks_to_change(attempt_id):
            if task.task_spec.identity.node == node and task.stage in (
                FakeTaskStage.STARTED,
                FakeTaskStage.ORPHANED,
            ):
                task.orphan(self.clock.monotonic() + lives_s)

    def kill_rank(self, attempt_id: str, node: str, signal: int = 9) -> None:
        """Kill a rank by a signal that is not ours. Its supervisor reports it."""
        now, ahead = self._times()
        for task in self.tasks(attempt_id):
            if task.task_spec.identity.node == node and task.stage is FakeTaskStage.STARTED:
                rank = task.task_spec.ranks.node_rank * task.task_spec.ranks.ranks_per_node
                outcome = task.lost_outcome(now + ahead, f"rank {rank} got signal {signal}")
                outcome = msgspec.structs.replace(outcome, kind=EndKind.SIGNALED, signal=signal, rank=rank)
                if task.can_regroup:
                    task.fail(now, outcome)
                else:
                    task.end(now, ahead, outcome)

    # The lease. The caller simulates the network.

    def renewals(self) -> list[SentRenewal]:
        """Return the renewals that supervisors send now; those of nodes that are cut off are lost on the
        way.
        """
        self.settle()
        now = self.clock.monotonic()
        sent = []
        for key in [key for key, task in self._awake.items() if task.is_asleep]:
            del self._awake[key]
        for task in self._awake.values():
            renewal = task.renewal(now)
            if renewal is not None and task.task_spec.identity.node not in self._cut:
                sent.append(SentRenewal(renewal=renewal, sent_at=now))
        return sent

    def deliver_reply(self, sent: SentRenewal, reply: RenewalReply) -> None:
        """Deliver the control plane's reply to the supervisor, unless its node is cut off."""
        task = self._renewal_sender(sent)
        if task is not None:
            task.renewed(sent.sent_at)
            task.regroup(sent.renewal, reply, *self._times())
            if reply.should_stop:
                task.stop(self.clock.monotonic(), reply.grace_s)
                self._wake()
                self.settle()

    def reject(self, sent: SentRenewal) -> None:
        """Deliver a rejection as stale: the attempt fences itself at once."""
        task = self._renewal_sender(sent)
        if task is not None:
            task.renewed(sent.sent_at)
            task.fence(self.clock.monotonic())
            self._wake()
            self.settle()

    def _tasks_to_change(self, attempt_id: str) -> list[FakeTask]:
        """Return the attempt's tasks for a change: from now on none of them counts as quiet."""
        tasks = self.tasks(attempt_id)
        self._wake()
        return tasks

    def _wake(self) -> None:
        self._quiet_until = -NEVER

    def _renewal_sender(self, sent: SentRenewal) -> FakeTask | None:
        self.settle()
        node = sent.renewal.node
        task = None if node in self._cut else self._tasks.get((sent.renewal.attempt_id, node))
        # A reply to a task that was replaced in the meantime is lost.
        return task if task and task.task_spec.identity.replacement == sent.renewal.replacement else None

    def _lose(self, task: FakeTask, message: str) -> None:
        now, ahead = self._times()
        task.end(now, ahead, task.lost_outcome(now + ahead, message))

    def _times(self) -> tuple[float, float]:
        """Return the monotonic time, and the difference that turns it into a date."""
        now = self.clock.monotonic()
        return now, self.clock.now() - now


def _can_begin(task_spec: TaskSpec, task: FakeTask | None) -> bool:
    if task is None:
        return True
    return (
        task.stage is FakeTaskStage.ENDED
        and task.task_spec.identity.replacement < task_spec.identity.replacement
    )
