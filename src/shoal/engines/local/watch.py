"""Look at one share, and see to its end: stop it, kill it, or bury what died without a word.

Evidence is the supervisor's lock. While somebody holds it the share lives; once it is free nothing of
the share will ever start, and what is left of it is killed before its end is told.
"""

# The spool names its files by strings: a supervisor starts without pathlib.
# ruff: noqa: PTH110, PTH112, PTH119

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from shoal import bounded_file
from shoal.clock import Clock
from shoal.engines.base import Observation, Sight
from shoal.engines.local.book import ShareView
from shoal.engines.local.notice import Notice
from shoal.engines.local.states import end_of, ended, seen
from shoal.engines.local.words import append_to_log, last_words, quoted
from shoal.runtime import spool
from shoal.wire import EndKind, NodeOutcome

T = TypeVar("T")

PATIENCE_S = 10.0
"""How long after its grace a supervisor may take to end before it is killed."""
BURIAL_S = 1.0
"""How long one look waits for killed processes to go. The next goes on with it, and waits no more: others are
looked at after it, and what is stuck in the kernel may be so for days."""
MAX_TOLD = 400
"""Of a file nobody can read."""
MAX_STARTS = 6
"""So many supervisors may end before they claim the share, over 15 s; then it is given up."""


class Watch:
    """Blocking. One at a time per share: every method holds the view's guard."""

    def __init__(self, clock: Clock, notice: Notice) -> None:
        self._clock = clock
        self._notice = notice

    def look(self, view: ShareView) -> Observation | None:
        """What can be seen of the share now; None if it was forgotten meanwhile.

        A share that cannot be read is never an exception: it must not hide the others.
        """
        with view.guard:
            try:
                return self._look(view)
            except (OSError, msgspec.DecodeError) as error:
                if not os.path.isdir(view.share.directory):
                    return None
                if isinstance(error, OSError):
                    return seen(view.key, Sight.UNKNOWN, _told(view, error))
                return self._garbled(view, _told(view, error))

    def stop(self, view: ShareView, grace_s: float) -> None:
        """Ask for its end; one that nobody has claimed ends at once. `OSError`: ask again."""
        with view.guard:
            if view.end is not None or _try(spool.read_outcome, view.share) is not None:
                return
            try:
                self._write_stop(view, grace_s)
                if not _is_claimed(view) and self._stop_unclaimed(view):
                    return
                if not _is_claimed(view) and self._clock.monotonic() >= self._kill_at(view, grace_s):
                    spool.kill_supervisors(view.share)  # one hangs between the lock and the claim
            finally:
                # Also on a full disk: the signal alone stops it, with the grace of its order.
                with contextlib.suppress(msgspec.DecodeError):
                    spool.signal_supervisor(view.share, signal.SIGTERM)

    def _look(self, view: ShareView) -> Observation:
        if view.end is not None:
            return view.end
        outcome = spool.read_outcome(view.share)
        if outcome is not None:
            return _close(view, outcome)
        if view.read_order() is None:
            return self._garbled(view, "order.json is missing")
        if not _is_claimed(view):
            return seen(view.key, Sight.PENDING, _why_pending(view))
        lock = spool.take_lock(view.share)
        if lock is None:
            return self._alive(view)
        try:
            return self._bury(view, "its supervisor died without an outcome")
        finally:
            os.close(lock)

    def _garbled(self, view: ShareView, told: str) -> Observation:
        """What does not say what to look for. With nobody left to keep its fence, it may run for ever."""
        try:
            is_orphaned = _is_claimed(view) and not spool.is_locked(view.share)
        except OSError:
            is_orphaned = False
        return seen(view.key, Sight.ORPHANED if is_orphaned else Sight.UNKNOWN, told)

    def _alive(self, view: ShareView) -> Observation:
        if view.started is None:
            view.started = _try(spool.read_started, view.share)
        if not view.is_followed and view.order is not None and len(view.order.nodes) > 1:
            view.is_followed = True
            self._notice.follow(view.share)
        if view.kill_at is None and os.path.exists(view.share.stop):
            # Left by an engine before us. Its date may lie, so the patience starts anew.
            stop = _try(spool.read_stop, view.share)
            view.kill_at = self._clock.monotonic() + (stop.grace_s if stop else 0.0) + PATIENCE_S
        if view.kill_at is not None and self._clock.monotonic() >= view.kill_at:
            return self._kill(view)
        started_at = view.started.at if view.started else None
        return seen(view.key, Sight.ALIVE, "its supervisor holds the lock", started_at=started_at)

    def _kill(self, view: ShareView) -> Observation:
        """The supervisor had its time: end it, and everything of its share."""
        spool.signal_supervisor(view.share, signal.SIGKILL)
        lock = _await_lock(view.share, 0.0 if view.is_stuck else BURIAL_S)
        if lock is None:
            self._is_cleared(view)
            view.is_stuck = True
            return seen(view.key, Sight.ALIVE, "its supervisor was killed, but does not die")
        try:
            return self._bury(view, "its supervisor did not stop in time and was killed")
        finally:
            os.close(lock)

    def _bury(self, view: ShareView, because: str) -> Observation:
        """With the lock held: nobody else will. Kill what is left, then say that it is over."""
        outcome = spool.read_outcome(view.share)
        if outcome is not None:
            return _close(view, outcome)
        claim = _try(spool.read_claim, view.share)
        # Nothing outlives a reboot; looking through the process table for every share would take long.
        if claim is None or claim.boot_id == spool.boot_id():
            if not self._is_cleared(view):
                return seen(view.key, Sight.ORPHANED, f"{because}, and {_what_lives(view)}")
        else:
            because = "the machine was restarted"
        if view.lost is None:
            view.lost = self._lost(view, because)
        try:
            spool.write_outcome(view.share, view.lost)
        except OSError as error:
            # It is over whether or not the disk takes it; the claim keeps it from ever starting again.
            raw = f"{because}; the outcome is not on disk: {error.strerror}"
            return seen(view.key, Sight.ENDED, raw, started_at=view.lost.started_at, outcome=view.lost)
        return _close(view, view.lost)

    def _is_cleared(self, view: ShareView) -> bool:
        """Kill what is left; whether all of it is gone."""
        timeout_s = 0.0 if view.is_stuck else BURIAL_S
        view.is_stuck = not spool.kill_leftovers(view.share.directory, view.order, timeout_s=timeout_s)
        return not view.is_stuck

    def _lost(self, view: ShareView, because: str) -> NodeOutcome:
        """Its end in words, here and in its log. Called once, when nobody writes that any more."""
        started = view.started or _try(spool.read_started, view.share)
        words = last_words(view.share.errors)
        append_to_log(view.share.log, self._clock.now(), [because, *words])
        message = f"{because}; it last said: {quoted(words)}" if words else because
        return end_of(view.key, EndKind.LOST, self._clock.now(), message, started.at if started else None)

    def _write_stop(self, view: ShareView, grace_s: float) -> None:
        """The shortest grace asked for counts, from when it was asked."""
        before = _try(spool.read_stop, view.share)
        if before is not None and before.grace_s <= grace_s:
            return
        spool.write_stop(view.share, spool.Stop(grace_s=grace_s, at=self._clock.now()))
        view.kill_at = min(self._kill_at(view, grace_s), self._clock.monotonic() + grace_s + PATIENCE_S)

    def _kill_at(self, view: ShareView, grace_s: float) -> float:
        if view.kill_at is None:
            view.kill_at = self._clock.monotonic() + grace_s + PATIENCE_S
        return view.kill_at

    def may_start(self, view: ShareView) -> bool:
        """Whether to start a supervisor now. Call it with the guard held and none of ours on its way.

        One that ended without a claim (it cannot be imported, or was killed) is tried again: at once, then
        after 1 s, doubled each time. At last the share is lost, with what the last of them said.
        """
        now = self._clock.monotonic()
        if view.child is not None:
            view.child = None
            view.num_failed += 1
            view.start_at = now + (2.0 ** (view.num_failed - 2) if view.num_failed > 1 else 0.0)
        if view.num_failed < MAX_STARTS:
            return now >= view.start_at
        self.give_up(view, f"no supervisor began it in {view.num_failed} tries")
        return False

    def give_up(self, view: ShareView, because: str) -> None:
        """Nobody is going to run it: it is lost, unless a supervisor claims it first. With the guard held."""
        self._end_unclaimed(view, lambda: self._lost(view, because))

    def _stop_unclaimed(self, view: ShareView) -> bool:
        told = "stopped before it started"
        return self._end_unclaimed(view, lambda: end_of(view.key, EndKind.STOPPED, self._clock.now(), told))

    def _end_unclaimed(self, view: ShareView, end: Callable[[], NodeOutcome]) -> bool:
        """Claim the share ourselves, so that no supervisor ever can. False: one was faster."""
        lock = spool.take_lock(view.share)
        if lock is None:
            return False
        try:
            if not spool.claim(view.share, self._clock.now()):
                return False
            with contextlib.suppress(msgspec.DecodeError):
                view.read_order()
            outcome = end()
            spool.write_outcome(view.share, outcome)
            _close(view, outcome)
        finally:
            os.close(lock)
        return True


def _close(view: ShareView, outcome: NodeOutcome) -> Observation:
    observation = ended(view.key, outcome)
    if observation.sight is Sight.ENDED:
        view.end = observation
    return observation


def _is_claimed(view: ShareView) -> bool:
    view.is_claimed = view.is_claimed or os.path.exists(view.share.claimed)
    return view.is_claimed


def _await_lock(share: spool.Share, timeout_s: float) -> int | None:
    """The lock, once the killed holder is gone; it usually is within a millisecond."""
    for _ in range(100):
        lock = spool.take_lock(share)
        if lock is not None or timeout_s == 0:
            return lock
        time.sleep(timeout_s / 100)
    return None


def _try(read: Callable[[spool.Share], T | None], share: spool.Share) -> T | None:
    """What the file says; None where it says nothing that can be understood."""
    with contextlib.suppress(msgspec.DecodeError):
        return read(share)
    return None


def _why_pending(view: ShareView) -> str:
    if not view.num_failed:
        return "not claimed by a supervisor yet"
    words = quoted(last_words(view.share.errors))
    return f"{view.num_failed} supervisors ended before they began; the last said: {words or 'nothing'}"


def _what_lives(view: ShareView) -> str:
    if spool.is_copied(view.share):
        return "its processes belong to the share that this one was copied from, so they are left alone"
    return "something of it does not die"


def _told(view: ShareView, error: Exception) -> str:
    """The error, and what is in the files it may be about."""
    told = f"{type(error).__name__}: {error}"
    for path in (view.share.order, view.share.outcome, view.share.claimed, view.share.cgroups):
        with contextlib.suppress(OSError):
            told += f"; {os.path.basename(path)}: {bounded_file.read_start(path, MAX_TOLD)!r}"
    return told
