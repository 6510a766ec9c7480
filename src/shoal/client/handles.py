"""Handles that `submit` returns: a job or an array to wait for, read, stop and retry."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shoal.errors import LimitReached

if TYPE_CHECKING:
    from shoal.client.connection import Connection

ENDED = ("succeeded", "failed", "cancelled")
FIRST_POLL_S, LAST_POLL_S = 0.1, 2.0


class WaitTimeout(LimitReached):
    """The `timeout_s` of a `wait` is over and the job has not ended. Raised by the client, not by
    a server.
    """

    code = "wait.over"


class JobHandle:
    """One job as last fetched; `refresh` fetches it again. `data` is the API's own reply."""

    def __init__(
        self,
        shoal: Connection,
        data: dict[str, Any],
        *,
        was_repeated: bool = False,
        left_behind: dict[str, Any] | None = None,
    ) -> None:
        self._shoal = shoal
        self.data = data
        self.was_repeated = was_repeated
        self.left_behind = left_behind or {}
        """Of a job just submitted: the files of the folder that were not sent (`num_files`, `files`, ...)."""

    def __repr__(self) -> str:
        return f"JobHandle({self.ref!r}, {self.status!r})"

    @property
    def job_id(self) -> str:
        return str(self.data["job_id"])

    @property
    def ref(self) -> str:
        """The name that people use: `vision/17`."""
        return str(self.data["ref"])

    @property
    def name(self) -> str:
        return str(self.data["name"])

    @property
    def status(self) -> str:
        """`queued starting running stopping`, then `succeeded failed cancelled`."""
        return str(self.data["status"])

    @property
    def is_ended(self) -> bool:
        return self.status in ENDED

    @property
    def exit_code(self) -> int | None:
        code = self.data.get("exit_code")
        return None if code is None else int(code)

    @property
    def because(self) -> str:
        """One sentence about how the job ended; empty until then."""
        return str(self.data.get("because") or "")

    def refresh(self) -> JobHandle:
        self.data = self._shoal.job_data(self.job_id)
        return self

    def wait(self, timeout_s: float | None = None) -> JobHandle:
        """Block until the job has ended. `WaitTimeout` after `timeout_s`; the job keeps running."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause = FIRST_POLL_S
        while not self.refresh().is_ended:
            if deadline is not None and time.monotonic() + pause > deadline:
                raise WaitTimeout(
                    f"job {self.ref} is still {self.status} after {timeout_s:g} s",
                    hint=f"it keeps running; see `shoal why {self.ref}`",
                )
            time.sleep(pause)
            pause = min(pause * 1.5, LAST_POLL_S)
        return self

    def logs(self, *, follow: bool = False, rank: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield its lines: `at node rank stream text`. With `follow`, until the job has ended."""
        return self._shoal.logs(self.job_id, follow=follow, rank=rank)

    def why(self, *, predict: bool = False) -> dict[str, Any]:
        return self._shoal.why(self.job_id, predict=predict)

    def metrics(self, *, names: Sequence[str] = (), points: int = 60) -> dict[str, Any]:
        """Return the measurements of the job and its nodes: `items`, each a curve of at most `points`
        points.
        """
        return self._shoal.metrics(self.job_id, names=names, points=points)

    def checkpoints(self, *, verify: bool = False) -> dict[str, Any]:
        """Return the contents of the checkpoint directory: `items`, and the `decision` how often to save."""
        return self._shoal.checkpoints(self.job_id, verify=verify)

    def stop(self) -> JobHandle:
        self.data = self._shoal.stop(self.job_id).data
        return self

    def retry(self) -> JobHandle:
        self.data = self._shoal.retry(self.job_id).data
        return self


class ArrayHandle:
    """The elements of one array. `jobs` holds the first hundred as submitted; `all` fetches every one."""

    def __init__(self, shoal: Connection, array_id: str, count: int, jobs: list[JobHandle]) -> None:
        self._shoal = shoal
        self.array_id = array_id
        self.count = count
        self.jobs = jobs

    def __repr__(self) -> str:
        return f"ArrayHandle({self.array_id!r}, count={self.count})"

    def all(self) -> list[JobHandle]:
        """Fetch every element, in the order of their indices."""
        elements = [JobHandle(self._shoal, job) for job in self._shoal.jobs(array=self.array_id)]
        return sorted(elements, key=lambda job: int((job.data.get("array") or {}).get("index", 0)))

    def wait(self) -> list[JobHandle]:
        """Block until every element has ended."""
        pause = FIRST_POLL_S
        while True:
            jobs = self.all()
            if all(job.is_ended for job in jobs):
                return jobs
            time.sleep(pause)
            pause = min(pause * 1.5, LAST_POLL_S)

    def stop(self) -> None:
        self._shoal.stop_array(self.array_id)
