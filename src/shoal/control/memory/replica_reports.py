"""What the supervisors of replicas report, and whether each server should sleep.

In memory, because supervisors repeat their reports and each turn of the service loop decides again.
"""

from __future__ import annotations

from shoal.control.memory.attempt_table import AttemptMemories
from shoal.wire import ReplicaStatus


class ReplicaReports:
    """Used on the event loop alone."""

    def __init__(self, attempts: AttemptMemories) -> None:
        self._attempts = attempts

    def status(self, attempt_id: str) -> ReplicaStatus | None:
        return self._attempts.get(attempt_id).replica_status

    def note_status(self, attempt_id: str, status: ReplicaStatus) -> None:
        self._attempts.of(attempt_id).replica_status = status

    def order_sleep(self, attempt_id: str, *, should_sleep: bool) -> bool:
        """Note whether the server should sleep. Return whether that is news."""
        memory = self._attempts.of(attempt_id)
        before, memory.should_sleep = memory.should_sleep, should_sleep
        return before != should_sleep

    def sleep_order(self, attempt_id: str) -> bool | None:
        """Return what the supervisor still has to be told; None if there is nothing, or the server already
        does it.
        """
        memory = self._attempts.get(attempt_id)
        status = memory.replica_status
        return memory.should_sleep if status is not None and memory.should_sleep != status.is_asleep else None
