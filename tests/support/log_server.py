"""Stands for a connection to a control plane whose whole log is a lab's."""

from __future__ import annotations

from typing import Any, Self

import msgspec

from shoal.store import EventFilter
from tests.support.lab import Lab


class LogServer:
    """Answers what commands ask of the event log, as it is when they connect."""

    def __init__(self, lab: Lab) -> None:
        found = lab.read(lambda tx: tx.events.page(0, EventFilter(), 1 << 30))
        self.log: list[dict[str, Any]] = msgspec.to_builtins(found)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def events(self, *, after: int = 0, limit: int, **wanted: str) -> list[dict[str, Any]]:
        found = [
            event
            for event in self.log
            if event["seq"] > after
            and event["kind"].startswith(wanted.get("kind", ""))
            and wanted.get("job", event["job_id"]) == event["job_id"]
        ]
        return found[:limit]
