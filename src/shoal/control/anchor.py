"""Remember the newest event outside the database, so that a log which lost its tail is found out."""

from __future__ import annotations

from pathlib import Path

import anyio.to_thread

from shoal.control.core import Core
from shoal.errors import StateError
from shoal.store import Flaw, read_anchor, write_anchor


def anchor_path(core: Core) -> Path:
    return core.settings.state_dir / "events.anchor"


async def drop_anchor(core: Core) -> None:
    """Write the newest entry down, if it is newer than the last one written.

    `StateError`: the log is not the one whose end was written down before.
    """
    head = await core.store.read(lambda tx: tx.events.head())
    if head.seq and head.seq != core.anchored:
        await anyio.to_thread.run_sync(write_anchor, anchor_path(core), head)
        core.anchored = head.seq


async def check_anchor(core: Core) -> None:
    """Refuse a database that ends before what this home remembers of it.

    Going on with one put back from a backup would give numbers out again and know nothing of what was
    started since.
    """
    known = await anyio.to_thread.run_sync(read_anchor, anchor_path(core))
    head = await core.store.read(lambda tx: tx.events.head())
    if known is not None and head.seq < known.seq:
        raise StateError(
            f"the database ends at event {head.seq}, but this home has seen event {known.seq}: "
            "it is older than the home, as after a restored backup",
            hint=f"put the newer database back, or accept what is lost with `rm {anchor_path(core)}`",
        )


async def verify_log(core: Core) -> Flaw | None:
    """The first entry that cannot be what was written, or None. Reads the whole log."""
    known = await anyio.to_thread.run_sync(read_anchor, anchor_path(core))
    return await core.store.read(lambda tx: tx.events.verify(anchor=known))
