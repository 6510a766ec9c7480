"""The folder below which jobs keep their checkpoints: list the jobs, inspect checkpoints, remove them.

The folder has one directory for each job, named by its id; everything else in it is ignored. On a cluster,
the folder lies in a directory that all nodes share, possibly with other homes. So a job that the caller does
not know is not ours.
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
from shoal.engines.checkpoint_reader import inspect_checkpoints
from shoal.engines.disk import on_thread
from shoal.engines.refusal import is_name
from shoal.errors import LimitReached, StateError
from shoal.runtime.files import removal

T = TypeVar("T")
MAX_INSPECTIONS = 2
"""Inspections at the same time: checkpoints are as many and as large as jobs make them, and no other work
waits for these threads."""
INSPECT_S = 10.0
"""For one inspection, in addition to the time for hashes."""
REMOVAL_S = 60.0
GONE = ".gone-"
"""Prefix of a directory that is being removed. No job has such a name."""


class CheckpointFolder:
    """The checkpoint folder of one engine.

    `EngineUnreachable`: the disk could not be used. Trying again is harmless.
    """

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock
        self._inspection_slots = anyio.CapacityLimiter(MAX_INSPECTIONS)
        self._removal_slots = anyio.CapacityLimiter(1)
        """Separate, so that an inspection does not wait for the removal of a large directory."""
        self._verifying = threading.Lock()

    async def jobs(self) -> list[str]:
        """Return the ids of the jobs that have a directory here. Continue interrupted removals."""
        names = await self._on_thread(self._names, self._inspection_slots)
        gone = [name for name in names if name.startswith(GONE)]
        if gone:
            await self._on_thread(lambda: self._remove(gone), self._removal_slots)
        return [name for name in names if is_name(name)]

    async def inspect(self, job_id: str, verify_s: float) -> SavedCheckpoints:
        """As `SupportsCheckpoints.inspect_checkpoints`."""
        if verify_s <= 0:
            return await self._inspect(job_id, 0.0)
        if not self._verifying.acquire(blocking=False):
            raise LimitReached(
                "checkpoints of another job are being verified", hint="try again in a few seconds"
            )
        try:
            return await self._inspect(job_id, verify_s)
        finally:
            self._verifying.release()

    async def drop(self, job_id: str) -> None:
        """Rename the directory at once, then remove it. May be repeated."""
        if is_name(job_id):
            await self._on_thread(lambda: self._drop(job_id), self._removal_slots)

    async def _inspect(self, job_id: str, verify_s: float) -> SavedCheckpoints:
        def work() -> SavedCheckpoints:
            if not self._folder.parent.is_dir():
                raise StateError(
                    f"this machine has no {self._folder.parent}, which nodes share and checkpoints are in",
                    hint=f"look on a node, `ls {self._folder / job_id}`, or mount it here",
                )
            hash_until = self._clock.monotonic() + verify_s
            look_until = hash_until + INSPECT_S
            return inspect_checkpoints(
                self._folder,
                job_id,
                may_hash=lambda: self._clock.monotonic() < hash_until,
                may_look=lambda: self._clock.monotonic() < look_until,
            )

        return await self._on_thread(work, self._inspection_slots)

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
