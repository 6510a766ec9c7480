"""The folder below which jobs keep their checkpoints: who has some, what they are, and how they go.

One directory for each job, by its id; whatever else lies there is nobody's business. On a cluster it is in a
directory that all nodes share, possibly with other homes: a job that the caller does not know is not ours.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread

from shoal.clock import Clock
from shoal.engines.base import SavedCheckpoints
from shoal.engines.refusal import is_name
from shoal.engines.saved import look
from shoal.engines.threads import on_thread
from shoal.errors import LimitReached, StateError
from shoal.runtime import removal

T = TypeVar("T")
MAX_LOOKS = 2
"""At checkpoints, at once: they are as many and as large as jobs make them, and nothing else waits for it."""
LOOK_S = 10.0
"""For one of them, beside what is verified."""
REMOVAL_S = 60.0
GONE = ".gone-"
"""Before the name of one that is being removed: no job is called so."""


class CheckpointFolder:
    """`EngineUnreachable`: the disk could not be used. Trying again is harmless."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock
        self._looks = anyio.CapacityLimiter(MAX_LOOKS)
        self._removals = anyio.CapacityLimiter(1)
        """Of their own: nobody who looks waits for a large one."""
        self._verifying = threading.Lock()

    async def jobs(self) -> list[str]:
        """The ids of the jobs that have a directory here. Goes on with removals that were cut off."""
        names = await self._on_thread(self._names, self._looks)
        gone = [name for name in names if name.startswith(GONE)]
        if gone:
            await self._on_thread(lambda: self._remove(gone), self._removals)
        return [name for name in names if is_name(name)]

    async def saved(self, job_id: str, verify_s: float) -> SavedCheckpoints:
        """As `SupportsCheckpoints.saved`."""
        if verify_s <= 0:
            return await self._look(job_id, 0.0)
        if not self._verifying.acquire(blocking=False):
            raise LimitReached(
                "checkpoints of another job are being verified", hint="try again in a few seconds"
            )
        try:
            return await self._look(job_id, verify_s)
        finally:
            self._verifying.release()

    async def drop(self, job_id: str) -> None:
        """Take it away at once, and remove it then. May be repeated."""
        if is_name(job_id):
            await self._on_thread(lambda: self._drop(job_id), self._removals)

    async def _look(self, job_id: str, verify_s: float) -> SavedCheckpoints:
        def work() -> SavedCheckpoints:
            if not self._folder.parent.is_dir():
                raise StateError(
                    f"this machine has no {self._folder.parent}, which nodes share and checkpoints are in",
                    hint=f"look on a node, `ls {self._folder / job_id}`, or mount it here",
                )
            hash_until = self._clock.monotonic() + verify_s
            look_until = hash_until + LOOK_S
            return look(
                self._folder,
                job_id,
                may_hash=lambda: self._clock.monotonic() < hash_until,
                may_look=lambda: self._clock.monotonic() < look_until,
            )

        return await self._on_thread(work, self._looks)

    def _names(self) -> list[str]:
        try:
            return sorted(entry.name for entry in self._folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _remove(self, names: list[str]) -> None:
        for name in names:
            removal.remove(str(self._folder / name), timeout_s=REMOVAL_S)

    def _drop(self, job_id: str) -> None:
        gone = self._folder / f"{GONE}{job_id}.{os.urandom(6).hex()}"
        try:
            (self._folder / job_id).rename(gone)
        except FileNotFoundError:
            return
        self._remove([gone.name])

    async def _on_thread(self, work: Callable[[], T], limiter: anyio.CapacityLimiter) -> T:
        return await on_thread(work, f"the checkpoints in {self._folder} cannot be used", limiter)
