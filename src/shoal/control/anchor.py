"""Remember the newest event outside the database, so that a log which lost its tail is found out."""

from __future__ import annotations

from pathlib import Path

import anyio.to_thread

from shoal.control.core import Core
from shoal.store import Flaw, read_anchor, write_anchor


def anchor_path(core: Core) -> Path:
    return core.settings.home / "events.anchor"


async def drop_anchor(core: Core) -> None:
    """Write the newest entry down, if it is newer than the last one written.

    `StateError`: the log is not the one whose end was written down before.
    """
    head = await core.store.read(lambda tx: tx.events.head())
    if head.seq and head.seq != core.anchored:
        await anyio.to_thread.run_sync(write_anchor, anchor_path(core), head)
        core.anchored = head.seq


async def verify_log(core: Core) -> Flaw | None:
    """The first entry that cannot be what was written, or None. Reads the whole log."""
    known = await anyio.to_thread.run_sync(read_anchor, anchor_path(core))
    return await core.store.read(lambda tx: tx.events.verify(anchor=known))
