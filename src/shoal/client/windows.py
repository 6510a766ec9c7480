"""Maintenance windows and reservations, as operators declare them and everybody sees them."""

from __future__ import annotations

from typing import Any

from shoal.client.people import Answer, items_of
from shoal.client.transport import Transport, path_of


class Windows:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def all(self) -> list[Answer]:
        """Those that are not over, the first to begin first."""
        return items_of(self._transport, path_of("windows"))

    def declare(self, kind: str, **asked: Any) -> Answer:
        """`kind`: `maintenance` or `reservation`. `nodes` or `count` (of `pool`), `from_at` (now, if not
        given), `duration_s`, for a reservation `project`, `because`.
        """
        body = {"kind": kind, **{name: value for name, value in asked.items() if value is not None}}
        return dict(self._transport.call("POST", path_of("windows"), json_body=body))

    def cancel(self, window_id: str) -> Answer:
        return dict(self._transport.call("DELETE", path_of("windows", window_id)))
