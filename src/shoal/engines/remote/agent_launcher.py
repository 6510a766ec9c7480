"""Starts node agents on the cluster for task specs that no process has, tries again, and gives up.

A cluster may lose what was submitted to it, so the launcher submits again. That is safe, because the
mailbox gives each task spec to one process only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from functools import partial
from typing import Protocol, TypeVar

import anyio
import msgspec

from shoal.clock import Clock
from shoal.engines.base import Submission
from shoal.engines.remote.cluster_observation import (
    NO_TRACE,
    PRESENT_STATES,
    ClusterObservations,
    ClusterTaskState,
)
from shoal.engines.remote.connection import ControlPlaneAccess
from shoal.engines.remote.mailbox import Mailbox, MailboxTask
from shoal.errors import EngineRefused
from shoal.wire import EndKind, LaunchRequest, TaskSpec

T = TypeVar("T")
STARTS_AT_ONCE = 8
"""Starts of different owners at the same time. Starts of one owner follow each other, because the starter
may be the owner's own process, such as `sbatch`, and an owner who stops it must block no other."""
MAX_STARTS = 6
MAX_PAUSE_S = 60.0


class LaunchTries(msgspec.Struct):
    """The tries to start one attempt's tasks of one replacement number."""

    num_tries: int = 0
    num_accepted: int = 0
    """How often the cluster accepted a start."""
    not_before: float = 0.0
    """Monotonic time before which it is not tried again."""


class LaunchBackend(Protocol):
    """The part of `RemoteEngine` that starts node agents."""

    name: str
    devices_from: str
    can_follow: bool

    async def launch(self, launch_request: LaunchRequest, task_specs: tuple[TaskSpec, ...]) -> None: ...

    async def observe_tasks(self, tasks: Collection[MailboxTask]) -> ClusterObservations: ...

    async def on_thread(self, work: Callable[[], T]) -> T: ...


class AgentLauncher:
    """One per engine. The number of tries is only in memory."""

    def __init__(
        self, backend: LaunchBackend, mailbox: Mailbox, clock: Clock, access: ControlPlaneAccess
    ) -> None:
        self._backend = backend
        self._mailbox = mailbox
        self._clock = clock
        self._access = access
        self._tries: dict[tuple[str, int], LaunchTries] = {}
        """By attempt and replacement number."""
        self._guards: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)
        """By owner, because starts of one attempt must exclude each other."""
        self._at_once = anyio.CapacityLimiter(STARTS_AT_ONCE)

    def forget(self, attempt_id: str) -> None:
        """Drop the tries of an attempt that the mailbox has forgotten."""
        self._tries = {key: tries for key, tries in self._tries.items() if key[0] != attempt_id}

    async def launch(self, submission: Submission, *, is_new: bool) -> None:
        """Start node agents for task specs that no process has, unless the cluster still has the last
        start.

        May be repeated. `is_new`: the cluster was never asked for any of them.
        """
        if not is_new and not await self._due(submission):
            return  # nothing to start, so do not wait for the lock
        async with self._guards[submission.task_specs[0].identity.owner], self._at_once:
            for replacement, (due, seen) in (await self._due(submission, is_new=is_new)).items():
                await self._launch_one(submission, replacement, due, seen)

    async def _due(
        self, submission: Submission, *, is_new: bool = False
    ) -> dict[int, tuple[list[MailboxTask], ClusterObservations]]:
        """Return, by replacement number, tasks for which no process has come or is on its way, and
        observations.
        """
        waiting = [task for task in self._mailbox.find(submission.attempt_id).values() if task.is_waiting]
        seen = await self._backend.observe_tasks(waiting) if waiting and not is_new else {}
        due_by_replacement = {}
        for replacement in sorted({task.identity.replacement for task in waiting}):
            due = [task for task in waiting if task.identity.replacement == replacement]
            if not any(
                self._state(task, seen) in PRESENT_STATES or self._has_successor(task) for task in due
            ):
                due_by_replacement[replacement] = due, seen
        return due_by_replacement

    async def _launch_one(
        self,
        submission: Submission,
        replacement: int,
        due: list[MailboxTask],
        observations: ClusterObservations,
    ) -> None:
        key, now = (submission.attempt_id, replacement), self._clock.monotonic()
        tries = self._tries.setdefault(key, LaunchTries())
        if now < tries.not_before:
            return
        if tries.num_accepted >= MAX_STARTS:
            raw_states = sorted({observations.get(task.key, NO_TRACE).raw for task in due})
            message = (
                f"no supervisor fetched the task spec in {tries.num_accepted} tries: {'; '.join(raw_states)}"
            )
            await self._close(due, message)
            return
        tries.not_before = now + min(2.0**tries.num_tries, MAX_PAUSE_S)
        tries.num_tries += 1
        launch_request = LaunchRequest(
            attempt_id=submission.attempt_id,
            urls=tuple(dict.fromkeys((*self._access.urls, *due[0].task_spec.lease.control_urls))),
            ca=self._access.ca,
            bootstrap_token=submission.bootstrap_token,
            replacement=replacement,
            spool=self._access.spool,
            devices_variable=self._backend.devices_from,
            can_replace=self._backend.can_follow,
        )
        try:
            await self._backend.launch(launch_request, tuple(task.task_spec for task in due))
        except EngineRefused as error:
            if tries.num_accepted == 0 and replacement == 0:
                await self._backend.on_thread(lambda: self._mailbox.withdraw(submission.attempt_id))
            if not self._mailbox.find(submission.attempt_id):
                raise
            # Other tasks of the attempt may run or may still begin. Only these are over.
            await self._close(due, f"{self._backend.name} refused it: {error.message}")
            return
        tries.num_accepted += 1  # a temporary rejection is no try

    async def _close(self, tasks: Collection[MailboxTask], reason: str) -> None:
        """Close tasks that no process has, so that none will get them."""
        for task in tasks:
            await self._backend.on_thread(partial(self._mailbox.close, task, EndKind.LOST, reason))

    def _has_successor(self, task: MailboxTask) -> bool:
        return task.successor_until is not None and self._clock.monotonic() < task.successor_until

    def _state(self, task: MailboxTask, observations: ClusterObservations) -> ClusterTaskState:
        return observations.get(task.key, NO_TRACE).state
