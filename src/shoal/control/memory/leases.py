"""Signs of life of tasks, in memory, on the monotonic clock.

Nothing here is stored. A restarted control plane counts silence from its own start, which can only make it
wait longer. So a heartbeat costs no write, and a jump of the wall clock moves no fence.

Only the event loop changes this object. Questions change nothing, so a transaction in another thread may ask
them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import inf

from shoal.clock import Clock
from shoal.control.memory.attempt_table import AttemptMemories, AttemptMemory, TaskKey
from shoal.model.attempt import Attempt
from shoal.scheduler.explain.text import listed

FENCE_MARGIN_S = 60.0
"""Added to the fence, because a supervisor notices its own deadline within one renewal interval."""
QUIET_S = 20.0
"""Silence that is reported to people: four missed renewals."""


class Leases:
    """When each task last gave a sign of life."""

    def __init__(self, clock: Clock, attempts: AttemptMemories) -> None:
        self._clock = clock
        self._attempts = attempts

    def follow(self, attempts: Sequence[Attempt]) -> None:
        """Count the silence of the tasks of these attempts, from now if there was no sign of life."""
        now = self._clock.monotonic()
        for attempt in attempts:
            memory = self._attempts.of(attempt.attempt_id)
            tasks = [(node, attempt.replacement_on(node)) for node in attempt.nodes_left]
            memory.followed_since = {task: memory.followed_since.get(task, now) for task in tasks}

    def note_alive(
        self,
        attempt_id: str,
        node: str,
        replacement: int = 0,
        *,
        ago_s: float = 0.0,
        is_hearsay: bool = False,
    ) -> None:
        """Note a sign of life, `ago_s` seconds old: the supervisor renewed, or its engine saw it alive.
        `is_hearsay`: only the cluster says that the task is there or waits, and nothing on the node has
        spoken.
        """
        at, task = self._clock.monotonic() - ago_s, (node, replacement)
        memory = self._attempts.of(attempt_id)
        memory.alive_at[task] = max(at, memory.alive_at.get(task, at))
        if not is_hearsay:
            memory.spoke_at[task] = max(at, memory.spoke_at.get(task, at))
            memory.queue_reasons.pop(node, None)

    @contextmanager
    def speaking(self, attempt_id: str, node: str, replacement: int = 0) -> Iterator[None]:
        """Hold off every fence while a node speaks and may be told to go on. The block decides that and calls
        `note_alive`. A read may be older than an end that is just being recorded: see `is_overdue`.
        """
        speaking, task = self._attempts.of(attempt_id).speaking, (node, replacement)
        speaking[task] += 1
        try:
            yield
        finally:
            speaking[task] -= 1
            if not speaking[task]:
                del speaking[task]

    def is_overdue(self, attempt_id: str, node: str, replacement: int = 0) -> bool:
        """Whether the task has been silent for so long that another transaction may be recording its end now,
        because of a fence or an operator's word. Then the reply to a renewal needs a write. That write comes
        before the end, which then does not happen, or after it.
        """
        return self._supervisor_silence_s(self._attempts.get(attempt_id), (node, replacement)) > QUIET_S

    def has_sign_of_life(self, attempt_id: str, node: str, replacement: int = 0) -> bool:
        """Whether this task has given any sign of life."""
        return (node, replacement) in self._attempts.get(attempt_id).alive_at

    def note_submission(self, attempt_id: str) -> None:
        """Note that the attempt was handed to its engine, perhaps in vain. A task that starts because of it
        is silent at first.
        """
        self._attempts.of(attempt_id).submitted_at = self._clock.monotonic()

    def note_trouble(
        self, attempt_id: str, node: str, reason: str | None, *, is_queued: bool = False
    ) -> None:
        """Note what the engine last said about a task that has not begun; None clears it. An empty `node`
        means the whole attempt. `is_queued`: the task waits in the cluster's own queue.
        """
        memory = self._attempts.of(attempt_id)
        memory.queue_reasons.pop(node, None)
        if reason is not None and is_queued:
            memory.queue_reasons[node] = reason
        if reason is None:
            memory.troubles.pop(node, None)
        else:
            memory.troubles[node] = reason

    def troubles(self, attempt_id: str, *, has_whole: bool = True) -> tuple[str, ...]:
        """Return why the attempt has not begun: each reason once, with the nodes it is about. `has_whole`:
        include the reasons that are about the whole attempt.
        """
        nodes: dict[str, list[str]] = {}
        for node, reason in sorted(self._attempts.get(attempt_id).troubles.items()):
            if node or has_whole:
                nodes.setdefault(reason, []).extend([node] if node else [])
        return tuple(f"{listed(names)}: {reason}" if names else reason for reason, names in nodes.items())

    def is_not_handed_over(self, attempt: Attempt, *, is_being_handed_over: bool) -> bool:
        """Whether no part of the attempt could be handed over, or that is under way, and its engine has said
        nothing of it.
        """
        troubles = self._attempts.get(attempt.attempt_id).troubles
        has_task = any(node in troubles for node in attempt.node_names)
        return (is_being_handed_over or "" in troubles) and not has_task

    def queue_reasons(self, attempt_id: str) -> tuple[str, ...]:
        """Return what the cluster says of tasks that wait in its own queue, each reason once."""
        reasons = self._attempts.get(attempt_id).queue_reasons
        return tuple(dict.fromkeys(reasons[node] for node in sorted(reasons)))

    def silence_s(self, attempt_id: str, node: str, replacement: int = 0) -> float:
        """Seconds since the last sign of life, or since the task is followed if there was none."""
        now, task = self._clock.monotonic(), (node, replacement)
        memory = self._attempts.get(attempt_id)
        return now - memory.alive_at.get(task, memory.followed_since.get(task, now))

    def task_silence_s(self, attempt: Attempt, node: str) -> float:
        """Silence of the node's present task of the attempt."""
        return self.silence_s(attempt.attempt_id, node, attempt.replacement_on(node))

    def silent_nodes(self, attempt: Attempt, for_s: float) -> tuple[str, ...]:
        """Return the nodes that may still run a task of the attempt and have been silent for longer than
        `for_s`.
        """
        return tuple(node for node in attempt.nodes_left if self.task_silence_s(attempt, node) > for_s)

    def supervisor_silence_s(self, attempt: Attempt, node: str) -> float:
        """Seconds since the node itself last spoke, or since the task is followed if it never did. 0 while a
        renewal is being answered. Infinite if the task waits in the cluster's own queue and never spoke,
        because then there is no supervisor.
        """
        memory, task = self._attempts.get(attempt.attempt_id), (node, attempt.replacement_on(node))
        return 0.0 if task in memory.speaking else self._supervisor_silence_s(memory, task)

    def _supervisor_silence_s(self, memory: AttemptMemory, task: TaskKey) -> float:
        now, node = self._clock.monotonic(), task[0]
        is_nobody = task not in memory.spoke_at and node in memory.queue_reasons
        return inf if is_nobody else now - memory.spoke_at.get(task, memory.followed_since.get(task, now))

    def fenced_nodes(self, attempt: Attempt, fence_s: float) -> tuple[str, ...]:
        """Return the nodes whose supervisors have certainly stopped everything of the attempt: they were
        silent, and the attempt was not submitted, for longer than the fence and its margin. A node is not
        among them if its supervisor died, or may have died, before the processes that it started, or if its
        renewal is being answered now.
        """
        limit = fence_s + FENCE_MARGIN_S
        silent = self.silent_nodes(attempt, limit) if self._since_submission_s(attempt) > limit else ()
        return tuple(node for node in silent if self.is_still_fenced(attempt, node, fence_s))

    def is_still_fenced(self, attempt: Attempt, node: str, fence_s: float) -> bool:
        """Whether a node of `fenced_nodes` is still silent. A submission for other nodes of the attempt
        meanwhile changes nothing, unless the node's own task was never seen to begin.
        """
        task, limit = (node, attempt.replacement_on(node)), fence_s + FENCE_MARGIN_S
        if node in attempt.nodes_to_start and self._since_submission_s(attempt) <= limit:
            return False
        speaking = self._attempts.get(attempt.attempt_id).speaking
        is_silent = self.task_silence_s(attempt, node) > limit and task not in speaking
        return is_silent and node not in attempt.orphaned_nodes

    def fence_left_s(self, attempt: Attempt, silent: Iterable[str], fence_s: float) -> float:
        """Seconds until the last of these nodes is fenced if it stays silent. A gang cannot end sooner."""
        silences = (self.task_silence_s(attempt, node) for node in silent)
        return fence_s + FENCE_MARGIN_S - min(self._since_submission_s(attempt), *silences)

    def _since_submission_s(self, attempt: Attempt) -> float:
        submitted_at = self._attempts.get(attempt.attempt_id).submitted_at
        return inf if submitted_at is None else self._clock.monotonic() - submitted_at

    def ran_for_s(self, attempt_id: str) -> float:
        """Seconds since this control plane first saw the attempt running. Never more than it really ran."""
        memory, now = self._attempts.of(attempt_id), self._clock.monotonic()
        if memory.running_since is None:
            memory.running_since = now
        return now - memory.running_since
