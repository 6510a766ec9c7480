"""Remember the newest event outside the database, so that a log which lost its tail is noticed.

The anchor is in the home, and also in a second place if one is set. A program that can write the database and
the home cannot write the second place. If the second place is away, work goes on, and the log, `shoal status`
and `shoal doctor` report it.
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

from shoal import home_identity
from shoal.control.bootstrap import home_id
from shoal.control.capabilities import Anchors
from shoal.control.memory.health import LoopHealth
from shoal.errors import StateError
from shoal.store import ChainFlaw, LogHead, Store, Tx, read_anchor, write_anchor

COPY_LOOP = "anchor-copy"
"""The name under which failures of the second place are reported, beside those of the loops."""
COPY_WAIT_S = 5.0
"""A network disk that does not answer for longer counts as away."""
T = TypeVar("T")
log = structlog.get_logger()
_copy_lock = threading.Lock()
"""Held by the thread that waits for the second place. While one thread hangs there, no other follows it."""


class AnchorRecord(NamedTuple):
    """What one place remembers. `problem`: why its anchor cannot be read."""

    path: Path
    head: LogHead | None = None
    problem: str = ""


def anchor_path(anchors: Anchors) -> Path:
    return anchors.settings.state_dir / "events.anchor"


def copy_path(anchors: Anchors) -> Path | None:
    """Return the file in the second place, or None if there is no such place.

    Several homes may share one second place, also a home and its restored copy. A copy has the `home_id` of
    its original, but a `site_id` of its own.
    """
    folder, home = anchors.settings.anchor_copy, anchors.settings.state_dir
    if folder is None:
        return None
    identity = home_identity.read_identity(home)
    names = (home_id(home) or "home", *([identity.site_id] if identity is not None else []))
    return folder / f"shoal-{'-'.join(names)}.anchor"


async def drop_anchor(anchors: Anchors, store: Store) -> None:
    """Write the newest entry down if it is newer than the last one written.

    `StateError`: the log is not the one whose end was written down before.
    """
    head = await store.read(lambda tx: tx.events.head())
    if not head.seq:
        return
    if head.seq != anchors.seq:
        await anyio.to_thread.run_sync(write_anchor, anchor_path(anchors), head, anchors.sealing.key)
        anchors.seq = head.seq
    path = copy_path(anchors)
    if path is None or head.seq == anchors.copy_seq:
        return
    try:
        await _run_with_timeout(partial(write_anchor, path, head, anchors.sealing.key))
    except OSError as error:
        _report_copy_away(anchors.loop_health, path, error)
        return
    anchors.copy_seq = head.seq
    anchors.loop_health.record_success(COPY_LOOP)


async def check_anchor(anchors: Anchors, store: Store, *, is_restored: bool = False) -> None:
    """Refuse a database that ends before the entry that this home or its second place remembers.

    A database from a backup would give numbers out again and know nothing of what was started since.
    `is_restored`: the home is a copy that is not settled. The file in the second place is its original's,
    which may have gone on, so only the home's own anchor counts.
    """
    home_anchor = anchor_path(anchors)
    for anchor in await read_anchors(anchors):
        if is_restored and anchor.path != home_anchor:
            continue
        if anchor.problem:
            _report_copy_away(anchors.loop_health, anchor.path, OSError(anchor.problem))
        if anchor.head is None:
            continue
        head = await store.read(lambda tx: tx.events.head())
        if head.seq < anchor.head.seq:
            raise StateError(
                f"the database ends at event {head.seq}, but {anchor.path} has seen event {anchor.head.seq}: "
                "it is older than the home, as after a restored backup, or its end was cut off",
                hint=f"put the newer database back, or accept what is lost with `rm {anchor.path}`",
            )
        flaw = await store.read(partial(_verify, anchor.head))
        if flaw is not None:
            raise StateError(
                f"the database's event {flaw.seq} is not the one that {anchor.path} remembers: "
                "it is another log, or one that was written again",
                hint=f"put the right database back, or accept this one with `rm {anchor.path}`",
            )


async def read_anchors(anchors: Anchors) -> list[AnchorRecord]:
    """Return what each place remembers, the home's own first. `StateError`: one of them is
    forged or damaged.
    """
    home_anchor = anchor_path(anchors)
    head = await anyio.to_thread.run_sync(read_anchor, home_anchor, anchors.sealing.key)
    at_home = AnchorRecord(home_anchor, head)
    path = copy_path(anchors)
    if path is None:
        return [at_home]
    try:
        copy = await _run_with_timeout(partial(_read_copy, path, anchors.sealing.key))
    except OSError as error:
        return [at_home, AnchorRecord(path, problem=_error_text(error))]
    if copy is None and head is not None:
        log.warning("anchor.copy_missing", path=str(path))
    return [at_home, AnchorRecord(path, copy)]


def _verify(head: LogHead, tx: Tx) -> ChainFlaw | None:
    return tx.events.verify_anchor(head)


def _read_copy(path: Path, key: bytes) -> LogHead | None:
    """Read the anchor. Raise `OSError` also if its folder is missing, because then the file system is not
    mounted.
    """
    path.parent.stat()
    return read_anchor(path, key)


async def _run_with_timeout(work: Callable[[], T]) -> T:
    """Run `work` in a thread and return its result. `OSError`: it failed, or took longer than
    `COPY_WAIT_S`.
    """

    def alone() -> T:
        if not _copy_lock.acquire(blocking=False):
            raise TimeoutError("an earlier attempt still waits for an answer")
        try:
            return work()
        finally:
            _copy_lock.release()

    with anyio.move_on_after(COPY_WAIT_S):
        return await anyio.to_thread.run_sync(alone, abandon_on_cancel=True)
    raise TimeoutError(f"no answer within {COPY_WAIT_S:g} s")


def _report_copy_away(loop_health: LoopHealth, path: Path, error: OSError) -> None:
    problem = StateError(
        f"{path} cannot be used: {_error_text(error)}; the log's end is remembered in the home alone"
    )
    log.warning("anchor.copy_away", path=str(path), error=_error_text(error))
    loop_health.record_failure(COPY_LOOP, problem)


def _error_text(error: OSError) -> str:
    return error.strerror or str(error)
