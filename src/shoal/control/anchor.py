"""Remember the newest event outside the database, so that a log which lost its tail is found out.

In the home, and in a second place if one is set: what can write the database and the home cannot write there.
The second place may be away. Then work goes on, and the log, `shoal status` and `shoal doctor` say so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import anyio
import anyio.to_thread
import structlog

from shoal import site
from shoal.control.core import Core
from shoal.control.first import home_id
from shoal.errors import StateError
from shoal.store import Flaw, Head, Tx, read_anchor, write_anchor

COPY = "anchor-copy"
"""The name by which its failures are told, beside those of the loops."""
COPY_WAIT_S = 5.0
"""A network's disk that does not answer for longer counts as away."""
T = TypeVar("T")
log = structlog.get_logger()
_copying = threading.Lock()
"""Held by the thread that waits for the second place: while one hangs there, no other is sent after it."""


class KnownAnchor(NamedTuple):
    """What one place remembers. `problem`: why that cannot be said."""

    path: Path
    head: Head | None = None
    problem: str = ""


def anchor_path(core: Core) -> Path:
    return core.settings.state_dir / "events.anchor"


def copy_path(core: Core) -> Path | None:
    """Return the file in the second place, or None if there is no such place.

    Several homes may share one second place, also a home and its restored copy. A copy has the `home_id` of
    its original, but a `site_id` of its own.
    """
    folder, home = core.settings.anchor_copy, core.settings.state_dir
    if folder is None:
        return None
    known = site.read_site(home)
    names = (home_id(home) or "home", *([known.site_id] if known is not None else []))
    return folder / f"shoal-{'-'.join(names)}.anchor"


async def drop_anchor(core: Core) -> None:
    """Write the newest entry down, if it is newer than the last one written.

    `StateError`: the log is not the one whose end was written down before.
    """
    head = await core.store.read(lambda tx: tx.events.head())
    if not head.seq:
        return
    if head.seq != core.anchored:
        await anyio.to_thread.run_sync(write_anchor, anchor_path(core), head, core.key)
        core.anchored = head.seq
    path = copy_path(core)
    if path is None or head.seq == core.anchored_copy:
        return
    try:
        await _reach(partial(write_anchor, path, head, core.key))
    except OSError as error:
        _tell_away(core, path, error)
        return
    core.anchored_copy = head.seq
    core.turns.went_well(COPY)


async def check_anchor(core: Core, *, is_restored: bool = False) -> None:
    """Refuse a database that ends before what this home, or its second place, remembers of it.

    Going on with one put back from a backup would give numbers out again and know nothing of what was
    started since. `is_restored`: the home is a copy that is not settled yet. The file in the second place is
    its original's, which may have gone on, so only the home's own anchor counts.
    """
    own = anchor_path(core)
    for known in await known_anchors(core):
        if is_restored and known.path != own:
            continue
        if known.problem:
            _tell_away(core, known.path, OSError(known.problem))
        if known.head is None:
            continue
        head = await core.store.read(lambda tx: tx.events.head())
        if head.seq < known.head.seq:
            raise StateError(
                f"the database ends at event {head.seq}, but {known.path} has seen event {known.head.seq}: "
                "it is older than the home, as after a restored backup, or its end was cut off",
                hint=f"put the newer database back, or accept what is lost with `rm {known.path}`",
            )
        flaw = await core.store.read(partial(_verify, known.head))
        if flaw is not None:
            raise StateError(
                f"the database's event {flaw.seq} is not the one that {known.path} remembers: "
                "it is another log, or one that was written anew",
                hint=f"put the right database back, or accept this one with `rm {known.path}`",
            )


async def known_anchors(core: Core) -> list[KnownAnchor]:
    """What each place remembers, the home's own first. `StateError`: one of them is forged or damaged."""
    own = anchor_path(core)
    found = [KnownAnchor(own, await anyio.to_thread.run_sync(read_anchor, own, core.key))]
    path = copy_path(core)
    if path is None:
        return found
    try:
        copy = await _reach(partial(_read_copy, path, core.key))
    except OSError as error:
        return [*found, KnownAnchor(path, problem=_why(error))]
    if copy is None and found[0].head is not None:
        log.warning("anchor.copy_missing", path=str(path))
    return [*found, KnownAnchor(path, copy)]


def _verify(head: Head, tx: Tx) -> Flaw | None:
    return tx.events.verify_anchor(head)


def _read_copy(path: Path, key: bytes) -> Head | None:
    """`OSError` also where its folder is not there: it is not mounted, then."""
    path.parent.stat()
    return read_anchor(path, key)


async def _reach(work: Callable[[], T]) -> T:
    """What `work` returns, done in a thread. `OSError`: it failed, or took longer than `COPY_WAIT_S`."""

    def alone() -> T:
        if not _copying.acquire(blocking=False):
            raise TimeoutError("an earlier attempt still waits for an answer")
        try:
            return work()
        finally:
            _copying.release()

    with anyio.move_on_after(COPY_WAIT_S):
        return await anyio.to_thread.run_sync(alone, abandon_on_cancel=True)
    raise TimeoutError(f"no answer within {COPY_WAIT_S:g} s")


def _tell_away(core: Core, path: Path, error: OSError) -> None:
    told = StateError(f"{path} cannot be used: {_why(error)}; the log's end is remembered in the home alone")
    log.warning("anchor.copy_away", path=str(path), error=_why(error))
    core.turns.failed(COPY, told)


def _why(error: OSError) -> str:
    return error.strerror or str(error)
