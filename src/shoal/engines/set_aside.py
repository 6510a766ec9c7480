"""Take everything out of a restored home that its records call alive, without a signal to any process.

The processes, if they live, belong to the home it was copied from. Logs stay readable. May be repeated after
a crash at any point.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from shoal.engines.cluster_id import DESK, SPOOL
from shoal.runtime import spool
from shoal.wire import EndKind, NodeOutcome, Order

BECAUSE = "this home was restored from a copy; what became of the original is not known here"
Outcomes = dict[str, NodeOutcome]
"""By node."""


def set_aside(home: Path, now: float) -> None:
    """Move live shares to the archived ones; standbys, sockets and the desk's records to the trash.

    `OSError`: it cannot be done, and no engine may look at the home.
    """
    root = home / SPOOL
    live, kept, trash = root / "live", root / "kept", root / "trash"
    for folder in (live, kept, trash):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for attempt in sorted(live.iterdir()):
        for directory in attempt.iterdir() if attempt.is_dir() else ():
            if directory.is_dir():
                _end(spool.Share(directory), now, trash)
        if (kept / attempt.name).exists():
            _move(attempt, trash)
        else:
            attempt.rename(kept / attempt.name)
    # The desk's folders name jobs of a cluster that the original still talks to: no record of them stays, so
    # none is cancelled and none is adopted.
    for rest in (root / "standby", home / "sockets", home / DESK / "live", home / DESK / "draft"):
        _move(rest, trash)


def outcomes_of(home: Path, attempt_id: str) -> Outcomes:
    """How the shares of an attempt ended that was set aside, where the copy says so."""
    found: Outcomes = {}
    attempt = home / SPOOL / "kept" / attempt_id
    for directory in sorted(attempt.iterdir()) if attempt.is_dir() else ():
        with contextlib.suppress(msgspec.DecodeError, NotADirectoryError):
            outcome = spool.read_outcome(spool.Share(directory))
            if outcome is not None and outcome.attempt_id == attempt_id:
                found[outcome.node] = outcome
    return found


def _end(share: spool.Share, now: float, trash: Path) -> None:
    """Readers of its log wait for an outcome."""
    with contextlib.suppress(msgspec.DecodeError):
        order = spool.read_order(share)
        if order is not None and spool.read_outcome(share) is None:
            spool.write_outcome(share, _lost(order, now))
    for path in (share.work, share.scratch, share.stand_ins, share.archive):
        _move(Path(path), trash)


def _move(path: Path, trash: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.rename(trash / f"{path.name}.{os.urandom(6).hex()}")


def _lost(order: Order, now: float) -> NodeOutcome:
    return NodeOutcome(
        attempt_id=order.attempt_id,
        epoch=order.epoch,
        node=order.node,
        kind=EndKind.LOST,
        ended_at=now,
        message=BECAUSE,
        incarnation=order.incarnation,
    )
