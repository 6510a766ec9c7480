"""Every reason from outside to end a share: asked to, too late, or no longer allowed."""

from __future__ import annotations

import contextlib
import math
import os
from types import FrameType

import msgspec

from shoal.clock import Clock
from shoal.runtime import spool
from shoal.runtime.ending import Ending
from shoal.runtime.kept import Kept
from shoal.runtime.renewal import Renewer
from shoal.wire import EndKind, Order

FENCED_GRACE_S = 10.0
"""So long after the fence may ranks end by themselves, counted from the last answer as the fence is: whoever
replaces them does not wait for one that slept meanwhile."""


class Reasons:
    """Looks at all of them at once. `now` is cheap enough for every turn of the loop."""

    def __init__(
        self,
        share: spool.Share,
        order: Order,
        clock: Clock,
        renewer: Renewer | None,
        kept: Kept | None = None,
    ) -> None:
        """`kept`: by whom, where a keeper has forked us."""
        self._kept = kept
        self._share = share
        self._order = order
        self._clock = clock
        self._renewer = renewer
        self._began_at = clock.monotonic()
        self._sigterm_at: float | None = None
        self._is_sigterm_ours: bool | None = None

    def on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        """Signal handler. The first one counts."""
        if self._sigterm_at is None:
            self._sigterm_at = self._clock.monotonic()

    def now(self) -> Ending | None:
        """The strongest reason to end now, None to go on."""
        return self._bereft() or self._stale() or self._fence() or self._asked() or self._time_limit()

    def signalled(self, least_s: float = -math.inf) -> Ending | None:
        """That a signal came, `least_s` ago or longer, which nobody of ours can have sent: ranks may have got
        it, too.
        """
        reason = self._asked()
        is_it = reason is not None and reason.is_unasked and self._asked_s() >= least_s
        return reason if is_it else None

    @property
    def is_bereft(self) -> bool:
        """Whether the keeper is dead that would hand in what we say."""
        return self._kept is not None and self._kept.is_over

    def next_in(self, most_s: float) -> float:
        """Seconds until one of the clocks may give a reason, at most `most_s`."""
        now = self._clock.monotonic()
        waits = [most_s]
        if self._order.time_limit_s is not None:
            waits.append(self._began_at + self._order.time_limit_s - now)
        if self._renewer is not None:
            waits.append(self._renewer.answered_at + self._order.fence_s - now)
        return max(0.0, min(waits))

    def _asked(self) -> Ending | None:
        # First the signal: who sends ours has written the stop before.
        has_sigterm, has_stop = self._sigterm_at is not None, os.path.exists(self._share.stop)
        stop = self._stop() if has_stop else None
        if stop is not None:
            told = f": {stop.because}" if stop.because else ""
            return Ending(
                kind=EndKind.STOPPED,
                message=f"stopped{'' if stop.is_unasked else ' as asked'}{told}",
                grace_s=stop.grace_s,
                is_unasked=stop.is_unasked,
            )
        if has_sigterm:
            if self._is_sigterm_ours is None:
                # One of ours comes without a word where the disk takes none, or does not give it back.
                self._is_sigterm_ours = has_stop or not spool.can_take_stop(self._share)
            return Ending(
                kind=EndKind.STOPPED,
                message="stopped by SIGTERM",
                grace_s=self._order.grace_s,
                is_unasked=not self._is_sigterm_ours,
            )
        answer = self._renewer.order_to_stop if self._renewer is not None else None
        if answer is None:
            return None
        because = f": {answer.because}" if answer.because else ""
        return Ending(
            kind=EndKind.STOPPED, message=f"stopped by the control plane{because}", grace_s=answer.grace_s
        )

    def _asked_s(self) -> float:
        """For how long somebody has asked: by the signal or, if that is older, by the stop, which a keeper
        writes that is sent the signal.
        """
        stop = self._stop()
        told_s = self._clock.now() - stop.at if stop is not None else -math.inf
        if self._sigterm_at is None:
            return told_s
        return max(told_s, self._clock.monotonic() - self._sigterm_at)

    def _stop(self) -> spool.Stop | None:
        """None: there is none, or it cannot be read."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return spool.read_stop(self._share)
        return None

    def _bereft(self) -> Ending | None:
        """Its cluster calls the share over with its keeper, and may give its room to others: no grace."""
        return Ending(kind=EndKind.LOST, message="its keeper was killed") if self.is_bereft else None

    def _stale(self) -> Ending | None:
        because = self._renewer.stale_because if self._renewer is not None else None
        if because is None:
            return None
        return Ending(
            kind=EndKind.FENCED, message=f"the control plane says that this attempt may not run: {because}"
        )

    def _fence(self) -> Ending | None:
        if self._renewer is None:
            return None
        silent_s = self._clock.monotonic() - self._renewer.answered_at
        if silent_s < self._order.fence_s:
            return None
        return Ending(
            kind=EndKind.FENCED,
            message=f"no answer from the control plane for {silent_s:.0f} s (fence {self._order.fence_s:g})",
            grace_s=min(self._order.grace_s, max(0.0, self._order.fence_s + FENCED_GRACE_S - silent_s)),
        )

    def _time_limit(self) -> Ending | None:
        limit_s = self._order.time_limit_s
        if limit_s is None or self._clock.monotonic() - self._began_at < limit_s:
            return None
        return Ending(
            kind=EndKind.TIME_LIMIT,
            message=f"the time limit of {limit_s:g} s has passed",
            grace_s=self._order.grace_s,
        )
