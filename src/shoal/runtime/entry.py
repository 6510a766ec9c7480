"""A supervisor's first steps: make sure that the share is its own, then run it.

Until the claim is on disk it changes nothing but the lock.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import msgspec

from shoal.clock import BootClock
from shoal.runtime import kernel, spool
from shoal.runtime.kept import Kept
from shoal.runtime.share import ShareRun
from shoal.wire import Credentials, Order

LOCK_PATIENCE_S = 2.0
DONE, NOTHING_TO_DO, USAGE = 0, 3, 64


def main(arguments: list[str], born_at: float | None = None, keeper: int | None = None) -> int:
    """0: the share ran and its outcome is written. 3: it is not ours to run, and nothing was done.

    `born_at`: from when the fence counts, where the control plane heard of it before it was made. `keeper`:
    who forked us, and whose end is ours.
    """
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m shoal.runtime.supervisor DIRECTORY < CREDENTIALS\n")
        return USAGE
    # Held back until the share can say that it was stopped: as soon as it is claimed, somebody may ask.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    kernel.hide_memory()
    os.umask(0o077)
    clock = BootClock()
    share = spool.Share(os.path.realpath(arguments[0]))
    taken = take(share, clock)
    if taken is None:
        return NOTHING_TO_DO
    kernel.become_subreaper()
    kept = Kept(keeper) if keeper is not None else None
    ShareRun(share, *taken, clock, _born_at(clock) if born_at is None else born_at, kept=kept).run()
    return DONE


def take(share: spool.Share, clock: BootClock) -> tuple[Order, Credentials] | None:
    """Claim the share for this process, for ever. None: it is not ours to run."""
    lock = _wait_for_lock(share, clock)
    if lock is None:
        return None
    # Before the claim: an engine that dies before it has handed them over may start us again.
    credentials = _read_credentials()
    order = spool.read_order(share)
    if credentials is None or order is None or not spool.claim(share, clock.now()):
        os.close(lock)
        return None
    return order, credentials


def _born_at(clock: BootClock) -> float:
    """When this process was made. The fence counts from there: whoever replaces a supervisor that hung on its
    way to the claim counts from when it was sent.
    """
    ticks = spool.start_ticks(os.getpid())
    return clock.monotonic() if ticks is None else ticks / os.sysconf("SC_CLK_TCK")


def _wait_for_lock(share: spool.Share, clock: BootClock) -> int | None:
    """Somebody may hold it for an instant to see whether we live; whoever keeps it has claimed the share."""
    deadline = clock.monotonic() + LOCK_PATIENCE_S
    while not os.path.exists(share.claimed):
        lock = spool.take_lock(share)
        if lock is not None or clock.monotonic() > deadline:
            return lock
        time.sleep(0.01)
    return None


def _read_credentials() -> Credentials | None:
    with os.fdopen(os.dup(0), "rb") as file:
        data = file.read()
    try:
        return msgspec.json.decode(data, type=Credentials)
    except msgspec.DecodeError:
        return None
