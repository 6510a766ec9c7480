"""Turns reports of node agents, and else the cluster's view, into observations of the tasks in a mailbox.

Tracks how long each task has been silent, and which tasks of a gang have not started. Closes tasks in the
mailbox that are known to be over or can begin nowhere. It asks no cluster and starts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import msgspec

from shoal.clock import Clock
from shoal.engines.base import Observation
from shoal.engines.remote.cluster_observation import ClusterObservation, ClusterObservations, ClusterTaskState
from shoal.engines.remote.mailbox import Mailbox, MailboxTask
from shoal.model.evidence import Evidence
from shoal.model.node import NodeFacts
from shoal.wire import AGENT_CONTACT_S, AGENT_PATIENCE_S, AGENT_PING_S, EndKind, TaskSpec

LATE_S = AGENT_PING_S + 2 * AGENT_CONTACT_S
"""How long a node agent may be silent before the cluster's evidence of its end counts. A living one may try
two other control planes in vain before it reaches us. A report contradicts the evidence."""
HEARD_S = LATE_S + 2.0
"""A task with a report that is more recent lives."""
SILENT_S = 3 * HEARD_S
"""A node with no report for this time takes no work. It is less than the shortest fence, so a task that is
replaced because its node is silent goes to another node."""
SILENT_REMARK = f"what runs there was not heard from for {SILENT_S:.0f} s"
BEHIND_S = AGENT_PATIENCE_S + 60.0
"""How long a task may wait for its node agent while the cluster runs its job and other tasks of the job
have started. By then its node agent has given up; one that comes later gets no task spec."""
REPLACED = "it did not report, and another task has its place"


class TaskObserver:
    """One per engine. Silences are counted only in memory, so a new instance has seen none.

    It writes ends to disk, and so it blocks.
    """

    def __init__(self, mailbox: Mailbox, clock: Clock, native_id: Callable[[str], str]) -> None:
        """Create the observer. `native_id` returns the engine's own id of an attempt."""
        self._mailbox = mailbox
        self._clock = clock
        self._native_id = native_id
        self._opened_at = clock.monotonic()
        self._first_observed_at = math.inf
        """Monotonic time of this process's first observation. Node agents that lived before may still
        report."""
        self._suspended: set[tuple[str, str]] = set()
        """Attempts and nodes of tasks that were suspended at the last observation."""
        self._behind: dict[tuple[str, str, int], float] = {}
        """By attempt, node and replacement: since when the task waits while other tasks have their task
        specs."""

    def forget(self, attempt_id: str) -> None:
        """Drop the waits of an attempt that the mailbox has forgotten."""
        self._behind = {key: at for key, at in self._behind.items() if key[0] != attempt_id}

    def is_silent(self, task: MailboxTask) -> bool:
        """Return whether the task has not reported for longer than a living one is silent."""
        heard_at = self._opened_at if task.last_report_at is None else task.last_report_at
        return task.outcome is None and self._clock.monotonic() - heard_at >= HEARD_S

    def mark_silent_nodes(self, nodes: Collection[NodeFacts]) -> list[NodeFacts]:
        """Return the nodes with those that cannot be reached from here marked as not alive.

        A cluster may take minutes to notice a cut, or may not be cut off itself. Suspended tasks are
        silent, and their silence says nothing.
        """
        silent = self._silent_nodes()
        return [_mark_unreachable(facts) if facts.name in silent else facts for facts in nodes]

    def _silent_nodes(self) -> set[str]:
        now, silences = self._clock.monotonic(), dict[str, float]()
        for task in self._mailbox.tasks():
            if task.outcome is None and task.assignment is not None and task.key not in self._suspended:
                heard_at = self._opened_at if task.last_report_at is None else task.last_report_at
                node = task.identity.node
                silences[node] = min(silences.get(node, now - heard_at), now - heard_at)
        return {node for node, silence_s in silences.items() if silence_s >= SILENT_S}

    def observe(
        self,
        tasks: Collection[MailboxTask],
        observations: ClusterObservations,
        default_observation: ClusterObservation,
    ) -> list[Observation]:
        """Return an observation of every task.

        Assigned tasks come first: a node is not silent if its silent task is known to be over.
        """
        self._first_observed_at = min(self._first_observed_at, self._clock.monotonic())
        assigned = {
            task.key: self._observe_task(task, observations.get(task.key, default_observation))
            for task in tasks
            if not task.is_waiting
        }
        self._close_stranded(tasks, observations, default_observation)
        return [
            assigned.get(task.key)
            or self._observe_task(task, observations.get(task.key, default_observation))
            for task in tasks
        ]

    def end_replaced(self, tasks: Collection[MailboxTask]) -> None:
        """End tasks whose place another node has taken, on evidence or after their fence.

        No process will write their end. A silent task without one would keep its node from work while the
        attempt continues.
        """
        newest = dict[str, TaskSpec]()
        for task in sorted(tasks, key=lambda task: task.identity.replacement):
            newest[task.identity.attempt_id] = task.task_spec
        for task in tasks:
            if (
                task.outcome is None
                and task.identity.node not in newest[task.identity.attempt_id].ranks.nodes
            ):
                is_closed = self._mailbox.close(task, EndKind.LOST, REPLACED)
                if not is_closed and self.is_silent(task):
                    self._mailbox.reap(task, EndKind.LOST, REPLACED)

    def _close_stranded(
        self,
        tasks: Collection[MailboxTask],
        observations: ClusterObservations,
        default_observation: ClusterObservation,
    ) -> None:
        """Close waiting tasks whose node takes no work or is silent, so that they may be placed elsewhere.

        A node agent that the cluster starts at this moment either has its task spec by then, and the task
        stays, or gets none.
        """
        silent = self._silent_nodes()
        for task in (task for task in tasks if task.is_waiting):
            observation, node = observations.get(task.key, default_observation), task.identity.node
            # A task in the cluster's queue may be there for longer than the node is silent.
            is_cut_off = node in silent and observation.state not in (
                ClusterTaskState.QUEUED,
                ClusterTaskState.AWAY,
            )
            if observation.stranded_reason or is_cut_off:
                message = f"{observation.stranded_reason or f'`{node}`: {SILENT_REMARK}'}; {observation.raw}"
                message = f"taken back before it began: {message}"
                self._mailbox.close_unstarted(
                    task.identity.attempt_id, task.launch_replacement, EndKind.LOST, message
                )

    def _observe_task(self, task: MailboxTask, observation: ClusterObservation) -> Observation:
        """Observe one task by the reports of its node agent, and else by what the cluster says."""
        now = self._clock.monotonic()
        silence_s = now - (
            min(self._first_observed_at, now) if task.last_report_at is None else task.last_report_at
        )
        # Until LATE_S a node agent that lived before us may still report, which contradicts the cluster.
        evidence = observation.evidence if silence_s >= LATE_S else observation.evidence.if_early
        if task.outcome is None and task.assignment is not None and evidence is Evidence.ENDED:
            self._mailbox.reap(task, EndKind.LOST, f"its supervisor is gone: {observation.raw}")
        behind_s = self._behind_s(task, observation)
        raw = f"{observation.raw}; others of it have begun, and no node agent has fetched this task spec"
        if behind_s >= BEHIND_S:
            self._mailbox.close(task, EndKind.LOST, f"{raw} in {BEHIND_S:.0f} s")
        if task.outcome is not None:
            return self._observation(task, Evidence.ENDED, task.outcome.kind)
        if task.is_waiting:
            is_queued = observation.state in (ClusterTaskState.QUEUED, ClusterTaskState.AWAY)
            evidence = Evidence.QUEUED if is_queued else Evidence.PENDING
            raw = raw if behind_s >= HEARD_S else observation.raw
            return self._observation(task, evidence, raw)
        is_heard = task.last_report_at is not None and silence_s < HEARD_S
        if observation.state is ClusterTaskState.SUSPENDED:
            self._suspended.add(task.key)
        else:
            self._suspended.discard(task.key)
        if task.leftovers:
            return self._observation(task, Evidence.ORPHANED, task.leftovers)
        if is_heard:
            return self._observation(task, Evidence.ALIVE, "its node agent reports", silent_s=silence_s)
        if observation.state is ClusterTaskState.SUSPENDED:
            return self._observation(task, Evidence.SUSPENDED, observation.raw)
        if evidence is Evidence.ORPHANED_PER_CLUSTER:
            return self._observation(task, evidence, observation.raw)
        return self._observation(task, evidence, f"its node agent is silent; {observation.raw}")

    def _behind_s(self, task: MailboxTask, observation: ClusterObservation) -> float:
        """Return how long the task has waited while other tasks of the same job have started.

        The cluster may report one state for all of them, which hides that one node agent is gone. Or the
        resources that one task waits for do not come, and the tasks that began cannot be cancelled with it.
        """
        key = (*task.key, task.identity.replacement)
        is_due = observation.state is ClusterTaskState.RUNNING or bool(observation.stranded_reason)
        if not task.is_waiting or not is_due or not self._have_others_begun(task):
            self._behind.pop(key, None)
            return 0.0
        now = self._clock.monotonic()
        return now - self._behind.setdefault(key, now)

    def _have_others_begun(self, task: MailboxTask) -> bool:
        return any(
            other.assignment is not None
            and not other.is_closed
            and other.launch_replacement == task.launch_replacement
            for other in self._mailbox.find(task.identity.attempt_id).values()
        )

    def _observation(
        self, task: MailboxTask, evidence: Evidence, raw: str, *, silent_s: float = 0.0
    ) -> Observation:
        task_spec, outcome = task.task_spec, task.outcome
        return Observation(
            attempt_id=task_spec.identity.attempt_id,
            epoch=task_spec.identity.epoch,
            node=task_spec.identity.node,
            native_id=self._native_id(task_spec.identity.attempt_id),
            evidence=evidence,
            replacement=task_spec.identity.replacement,
            started_at=outcome.started_at if outcome is not None else task.started_at,
            outcome=outcome,
            raw=str(raw),
            silent_s=silent_s,
        )


def _mark_unreachable(facts: NodeFacts) -> NodeFacts:
    return msgspec.structs.replace(facts, is_alive=False, closed="", remarks=(*facts.remarks, SILENT_REMARK))
