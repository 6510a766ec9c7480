"""Who asked for a change: what events and the audit record."""

from __future__ import annotations

import msgspec


class Actor(msgspec.Struct, frozen=True, kw_only=True):
    """`kind` is `user`, `job`, `supervisor` or `shoal`."""

    kind: str
    id: str
    name: str
    request_id: str | None = None

    def __str__(self) -> str:
        return self.kind if self.kind == "shoal" else f"{self.kind}:{self.name}"


SHOAL = Actor(kind="shoal", id="shoal", name="shoal")
"""The control loops themselves."""
