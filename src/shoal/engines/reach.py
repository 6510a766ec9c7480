"""How supervisors on other machines come back to the control planes that sent for them."""

from __future__ import annotations

import msgspec


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """How supervisors on other machines find and know the control planes, and where they work."""

    urls: tuple[str, ...]
    ca: str
    spool: str = ""
    """On each node's own disk; empty: below its /tmp."""
    shared: str = ""
    """A directory that every node and the control plane have; empty: there is none."""
