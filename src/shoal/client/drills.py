"""Drills, as those who may ask for them do and everybody sees them."""

from __future__ import annotations

import time
from typing import Any

from shoal.client.people import Answer
from shoal.client.transport import Transport, path_of
from shoal.errors import LimitReached, NotFound

POLL_S = 0.25


class Drills:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def of_ranks(self, kind: str, job_id: str, **asked: Any) -> Answer:
        """`kill-rank`, `hang` or `corrupt-checkpoint`. `rank`, `window_s`, `within_s`, `is_forced`."""
        body = {"kind": kind, **_given(asked)}
        return dict(self._transport.call("POST", path_of("jobs", job_id, "drills"), json_body=body))

    def of_cluster(self, kind: str, job_id: str | None = None, **asked: Any) -> Answer:
        """`kill-node`, `partition` or, of no job, `kill-control`. `node`, `for_s` and as for ranks."""
        body = {"kind": kind, **_given({"job_id": job_id, **asked})}
        return dict(self._transport.call("POST", path_of("drills"), json_body=body))

    def history(self, job_id: str | None = None, limit: int = 20) -> list[Answer]:
        """The newest, oldest of them first; of one job or of all."""
        params = {"job": job_id, "limit": limit}
        return list(self._transport.call("GET", path_of("drills"), params=params)["items"])

    def wait(self, drill: Answer, timeout_s: float) -> Answer:
        """The same drill with its result. `LimitReached` after so long; it goes on."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = [one for one in self.history(drill["job_id"]) if one["id"] == drill["id"]]
            if not found:
                raise NotFound(f"no drill `{drill['id']}`", hint="shoal drill history")
            if found[0]["result"] is not None:
                return found[0]
            if time.monotonic() > deadline:
                raise LimitReached(
                    f"drill {drill['id']} has no result after {timeout_s:g} s", hint="shoal drill history"
                )
            # One that is of no job is looked for among all events.
            time.sleep(POLL_S if drill["job_id"] else 4 * POLL_S)


def _given(asked: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in asked.items() if value is not None}
