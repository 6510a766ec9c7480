"""Who asked for a change: what events and the audit record."""

from __future__ import annotations

import msgspec

from shoal.control.rights import Rights


class Actor(msgspec.Struct, frozen=True, kw_only=True):
    """`kind` is `user`, `job`, `supervisor` or `shoal`."""

    kind: str
    id: str
    name: str
    request_id: str | None = None
    rights: Rights | None = None
    """A person's, to be asked again before anything is done. None: who acts proved its right otherwise."""

    @property
    def token_id(self) -> str | None:
        """The token it came with."""
        return self.rights.caller.token_id if self.rights is not None else None

    def __str__(self) -> str:
        return self.kind if self.kind == "shoal" else f"{self.kind}:{self.name}"


SHOAL = Actor(kind="shoal", id="shoal", name="shoal")
"""The control loops themselves."""
