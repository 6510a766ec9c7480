"""What a job that is stopped from outside keeps of its work: all up to its last checkpoint, at a price."""

from __future__ import annotations

from math import ceil, inf

import msgspec

from shoal.errors import SpecError


class Progress(msgspec.Struct, frozen=True):
    """Of an attempt that was cut short, in seconds: kept and lost work, and time that was neither."""

    kept_s: float
    lost_s: float
    overhead_s: float


class Checkpoints(msgspec.Struct, frozen=True, kw_only=True):
    """A modelled program: works `interval_s`, writes for `cost_s`, and so on; none is written at the end.

    An attempt that goes on from a checkpoint reads for `restart_s` first. The default never writes one: what
    is stopped begins anew.
    """

    interval_s: float = inf
    cost_s: float = 0.0
    restart_s: float = 0.0

    def __post_init__(self) -> None:
        if self.interval_s <= 0 or self.cost_s < 0 or self.restart_s < 0:
            raise SpecError(
                f"a checkpoint every {self.interval_s:g} s that costs {self.cost_s:g} s and "
                f"{self.restart_s:g} s to go on from: the first must be above 0, the others not below",
                hint="--checkpoint 1h,30s,2m",
            )

    def overhead_s(self, work_s: float, *, is_restart: bool) -> float:
        """How much longer than its work an attempt takes that does `work_s` to the end."""
        written = 0 if self.interval_s == inf else max(0, ceil(work_s / self.interval_s) - 1)
        return written * self.cost_s + (self.restart_s if is_restart else 0.0)

    def last_s(self, ran_s: float, *, is_restart: bool) -> float | None:
        """How long after its start an attempt that has run so long had its last one written; None: none."""
        restart_s = self.restart_s if is_restart else 0.0
        step_s = self.interval_s + self.cost_s
        written = max(ran_s - restart_s, 0.0) // step_s
        return restart_s + written * step_s if written else None

    def cut_short(self, ran_s: float, *, is_restart: bool) -> Progress:
        """What an attempt that is stopped after `ran_s` has to show for it."""
        restart_s = min(ran_s, self.restart_s) if is_restart else 0.0
        ran_s -= restart_s
        if self.interval_s == inf:
            return Progress(0.0, ran_s, restart_s)
        written, rest_s = divmod(ran_s, self.interval_s + self.cost_s)
        # A checkpoint that was being written is no checkpoint.
        lost_s = min(rest_s, self.interval_s)
        return Progress(
            written * self.interval_s, lost_s, restart_s + written * self.cost_s + (rest_s - lost_s)
        )
