"""Signs of life of tasks, in memory, on the monotonic clock.

Nothing here is stored. A restarted control plane counts silence from its own start, which can only make it
wait longer. So a heartbeat costs no write, and a jump of the wall clock moves no fence.

Only the event loop changes this object. Questions change nothing, so a transaction in another thread may ask
them too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import inf

from shoal.clock import Clock
from shoal.model.attempt import Attempt
from shoal.scheduler.explain.text import listed

FENCE_MARGIN_S = 60.0
"""Added to the fence, because a supervisor notices its own deadline within one renewal interval."""
QUIET_S = 20.0
"""Silence that is reported to people: four missed renewals."""


class Leases:
    """When each task last gave a sign of life."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._alive_at: dict[tuple[str, str, int], float] = {}
        """By attempt, node and replacement. The silence of a task does not count for the task that replaces
        it.
        """
        self._spoke_at: dict[tuple[str, str, int], float] = {}
        """The same, but only signs from the node itself. A cluster's word holds off a fence and does nothing
        else.
        """
        self._speaking = Counter[tuple[str, str, int]]()
        """Tasks whose renewal is being answered now."""
        self._followed_since: dict[tuple[str, str, int], float] = {}
        """Since when this control plane follows the tasks that may run: see `follow`."""
        self._submitted_at: dict[str, float] = {}
        self._running_since: dict[str, float] = {}
        self._troubles: dict[tuple[str, str], str] = {}
        """By attempt that has not begun, and node. The node is empty if the whole attempt could not be handed
        over.
        """
        self._queue_reasons: dict[tuple[str, str], str] = {}
        """The troubles of tasks that wait in the cluster's own queue."""

    def follow(self, attempts: Sequence[Attempt]) -> None:
        """Count the silence of the tasks of these attempts, from now if there was no sign of life. Forget all
        others.
        """
        now, kept = self._clock.monotonic(), {attempt.attempt_id for attempt in attempts}
        tasks = [
            (attempt.attempt_id, node, attempt.replacement_on(node))
            for attempt in attempts
            for node in attempt.nodes_left
        ]
        self._followed_since = {task: self._followed_since.get(task, now) for task in tasks}
        self._alive_at = {key: at for key, at in self._alive_at.items() if key[0] in kept}
        self._spoke_at = {key: at for key, at in self._spoke_at.items() if key[0] in kept}
        self._submitted_at = {k: at for k, at in self._submitted_at.items() if k in kept}
        self._troubles = {key: reason for key, reason in self._troubles.items() if key[0] in kept}
        self._queue_reasons = {key: reason for key, reason in self._queue_reasons.items() if key[0] in kept}
        self._running_since = {k: at for k, at in self._running_since.items() if k in kept}

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
        at, task = self._clock.monotonic() - ago_s, (attempt_id, node, replacement)
        self._alive_at[task] = max(at, self._alive_at.get(task, at))
        if not is_hearsay:
            self._spoke_at[task] = max(at, self._spoke_at.get(task, at))
            self._queue_reasons.pop((attempt_id, node), None)

    @contextmanager
    def speaking(self, attempt_id: str, node: str, replacement: int = 0) -> Iterator[None]:
        """Hold off every fence while a node speaks and may be told to go on. The block decides that and calls
        `note_alive`. A read may be older than an end that is just being recorded: see `is_overdue`.
        """
        task = (attempt_id, node, replacement)
        self._speaking[task] += 1
        try:
            yield
        finally:
            self._speaking[task] -= 1
            if not self._speaking[task]:
                del self._speaking[task]

    def is_overdue(self, attempt_id: str, node: str, replacement: int = 0) -> bool:
        """Whether the task has been silent for so long that another transaction may be recording its end now,
        because of a fence or an operator's word. Then the reply to a renewal needs a write. That write comes
        before the end, which then does not happen, or after it.
        """
        return self._supervisor_silence_s((attempt_id, node, replacement)) > QUIET_S

    def has_sign_of_life(self, attempt_id: str, node: str, replacement: int = 0) -> bool:
        """Whether this task has given any sign of life."""
        return (attempt_id, node, replacement) in self._alive_at

    def note_submission(self, attempt_id: str) -> None:
        """Note that the attempt was handed to its engine, perhaps in vain. A task that starts because of it
        is silent at first.
        """
        self._submitted_at[attempt_id] = self._clock.monotonic()

    def note_trouble(
        self, attempt_id: str, node: str, reason: str | None, *, is_queued: bool = False
    ) -> None:
        """Note what the engine last said about a task that has not begun; None clears it. An empty `node`
        means the whole attempt. `is_queued`: the task waits in the cluster's own queue.
        """
        self._queue_reasons.pop((attempt_id, node), None)
        if reason is not None and is_queued:
            self._queue_reasons[attempt_id, node] = reason
        if reason is None:
            self._troubles.pop((attempt_id, node), None)
        else:
            self._troubles[attempt_id, node] = reason

    def troubles(self, attempt_id: str, *, has_whole: bool = True) -> tuple[str, ...]:
        """Return why the attempt has not begun: each reason once, with the nodes it is about. `has_whole`:
        include the reasons that are about the whole attempt.
        """
        nodes: dict[str, list[str]] = {}
        for (trouble_attempt_id, node), reason in sorted(self._troubles.items()):
            if trouble_attempt_id == attempt_id and (node or has_whole):
                nodes.setdefault(reason, []).extend([node] if node else [])
        return tuple(f"{listed(names)}: {reason}" if names else reason for reason, names in nodes.items())

    def is_not_handed_over(self, attempt: Attempt, *, is_being_handed_over: bool) -> bool:
        """Whether no part of the attempt could be handed over, or that is under way, and its engine has said
        nothing of it.
        """
        attempt_id = attempt.attempt_id
        has_task = any((attempt_id, node) in self._troubles for node in attempt.node_names)
        return (is_being_handed_over or (attempt_id, "") in self._troubles) and not has_task

    def queue_reasons(self, attempt_id: str) -> tuple[str, ...]:
        """Return what the cluster says of tasks that wait in its own queue, each reason once."""
        return tuple(
            dict.fromkeys(
                reason for key, reason in sorted(self._queue_reasons.items()) if key[0] == attempt_id
            )
        )

    def silence_s(self, attempt_id: str, node: str, replacement: int = 0) -> float:
        """Seconds since the last sign of life, or since the task is followed if there was none."""
        now, task = self._clock.monotonic(), (attempt_id, node, replacement)
        return now - self._alive_at.get(task, self._followed_since.get(task, now))

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
        task = attempt.attempt_id, node, attempt.replacement_on(node)
        return 0.0 if task in self._speaking else self._supervisor_silence_s(task)

    def _supervisor_silence_s(self, task: tuple[str, str, int]) -> float:
        now = self._clock.monotonic()
        is_nobody = task not in self._spoke_at and task[:2] in self._queue_reasons
        return inf if is_nobody else now - self._spoke_at.get(task, self._followed_since.get(task, now))

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
        task, limit = (attempt.attempt_id, node, attempt.replacement_on(node)), fence_s + FENCE_MARGIN_S
        if node in attempt.nodes_to_start and self._since_submission_s(attempt) <= limit:
            return False
        is_silent = self.silence_s(*task) > limit and task not in self._speaking
        return is_silent and node not in attempt.orphaned_nodes

    def fence_left_s(self, attempt: Attempt, silent: Iterable[str], fence_s: float) -> float:
        """Seconds until the last of these nodes is fenced if it stays silent. A gang cannot end sooner."""
        silences = (self.task_silence_s(attempt, node) for node in silent)
        return fence_s + FENCE_MARGIN_S - min(self._since_submission_s(attempt), *silences)

    def _since_submission_s(self, attempt: Attempt) -> float:
        return self._clock.monotonic() - self._submitted_at.get(attempt.attempt_id, -inf)

    def ran_for_s(self, attempt_id: str) -> float:
        """Seconds since this control plane first saw the attempt running. Never more than it really ran."""
        now = self._clock.monotonic()
        return now - self._running_since.setdefault(attempt_id, now)
