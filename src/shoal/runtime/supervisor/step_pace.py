"""Tell hanging ranks from slow ones, by the pace of their own steps. Pure.

The limit for a silence depends on what the ranks do meanwhile. A rank that was stopped with a signal makes no
step, however long one waits, so it counts as hanging after the time of some steps. An idle rank may wait for
a disk or for data. A working rank may evaluate or compile. A waiting rank may wait for one of those. It is
worse to end a healthy rank than to wait.
"""

from __future__ import annotations

from enum import Enum, auto

MIN_STEPS = 10
"""With fewer steps, little is known about their length: the first ones compile, load and allocate."""
LEAVE_S = 5.0
"""How long a rank without anything to finish may take to come out of a group that ended."""
BUSY_SHARE = 0.05
"""Part of one processor. More than that counts as work."""


class RankActivity(Enum):
    """What a node's ranks do while they make no step."""

    STOPPED = auto()
    """A rank was stopped with a signal that is not the supervisor's."""
    NOTHING = auto()
    WAITING = auto()
    """The same as `NOTHING`, and all ranks stand where ranks wait for others."""
    WORK = auto()


MIN_SILENCE_S = {
    RankActivity.STOPPED: 1.0,
    RankActivity.NOTHING: 20.0,
    RankActivity.WAITING: 600.0,
    RankActivity.WORK: 1800.0,
}
"""A shorter silence is no hang. Collectives also wait 600 s, unless their program sets another timeout."""
MIN_SILENCE_AT_FIRST_S = MIN_SILENCE_S | {RankActivity.STOPPED: 5.0, RankActivity.NOTHING: 60.0}
"""The same limits, while little is known about the steps."""
FACTOR = {
    RankActivity.STOPPED: 8.0,
    RankActivity.NOTHING: 8.0,
    RankActivity.WAITING: 8.0,
    RankActivity.WORK: 60.0,
}
"""A silence of fewer than this many of the longest steps is no hang either."""
EXTENSION_FACTOR = 2.0
"""A silence that was called a hang may have been none, so the next limit is longer by this factor."""
MAX_EXTENDED_S = {
    RankActivity.STOPPED: MIN_SILENCE_S[RankActivity.WORK],
    RankActivity.NOTHING: MIN_SILENCE_S[RankActivity.WORK],
    RankActivity.WAITING: 4 * MIN_SILENCE_S[RankActivity.WAITING],
    RankActivity.WORK: 4 * MIN_SILENCE_S[RankActivity.WORK],
}
"""The bound for extended limits: a job that hangs again and again must finally be found hanging."""


class StepPace:
    """The pace of a node's groups: at `step` since `since`, and the longest step took `longest_s`.

    `step` is -1 until the current group was recorded, or while one of its ranks is new.
    """

    def __init__(self) -> None:
        self.step = -1
        self.since = 0.0
        self.longest_s = 0.0
        self._count = 0
        self._has_looked = self._has_stepped = self._is_first_timed = False
        self._worked_s = self._counted_from = 0.0
        self._extended_s = dict.fromkeys(RankActivity, 0.0)

    def begin(self, *, is_after_hang: bool = False) -> None:
        """Note a new group. What is known of steps stays, and the time until its first step is no step.

        `is_after_hang`: the group before ended for a hang. That may have been a long step, for example an
        evaluation, that is repeated now. It counts as a step then, so it is called a hang only once.
        """
        self.step, self._has_looked, self._has_stepped = -1, False, False
        self._is_first_timed = is_after_hang

    def record(self, now: float, step: int, worked_s: float, *, has_stepped: bool = True) -> None:
        """Record `step`, the lowest of the node's ranks, and `worked_s`, their work together so far.

        `has_stepped`: they made that step in this group, instead of bringing it along.
        """
        if self._has_looked and (step, has_stepped) == (self.step, self._has_stepped):
            return
        if self._has_stepped or (self._has_looked and self._is_first_timed):
            self.longest_s = max(self.longest_s, now - self.since)
        # Several steps may lie between two checks. Steps before the first check were not timed.
        self._count += max(1, step - self.step) if self._has_stepped else int(has_stepped)
        self.step, self._has_looked, self._has_stepped = step, True, has_stepped
        self.restart_clock(now, worked_s)

    def restart_clock(self, now: float, worked_s: float) -> None:
        """Ignore the time up to now: it is no silence, and makes no step longer."""
        self.since = now
        self.ignore_work(now, worked_s)

    def ignore_work(self, now: float, worked_s: float) -> None:
        """Ignore the work up to now, because not only the ranks did it."""
        self._counted_from, self._worked_s = now, worked_s

    def verdict(self, now: float, worked_s: float, *, is_stopped: bool) -> RankActivity | None:
        """Return what the ranks do if the silence is too long for that, which is a hang. None: all is
        well.
        """
        if not self._has_looked or not (self._is_known or self._has_stepped):
            return None
        # One step alone says nothing about the length of steps, so a rank in its second step has the limit
        # of a working one.
        is_idle = self.longest_s > 0.0 and self.is_idle(now, worked_s)
        doing = RankActivity.NOTHING if is_idle else RankActivity.WORK
        kinds = [RankActivity.STOPPED, doing] if is_stopped else [doing]
        return next((kind for kind in kinds if now - self.since > self.limit_s(kind)), None)

    def is_idle(self, now: float, worked_s: float) -> bool:
        """Whether no rank has worked since the last step, in a group that has made one."""
        counted_s = now - self._counted_from
        # Only idleness as long as a hang counts: a wait for a disk after long work takes seconds, too.
        is_counted = self._counted_from == self.since or counted_s > self.limit_s(RankActivity.NOTHING)
        # Before its first step a group waits for the model, which may take longer than many short steps.
        return self._has_stepped and is_counted and worked_s - self._worked_s <= BUSY_SHARE * counted_s

    def limit_s(self, activity: RankActivity) -> float:
        """Return how long a silence may be while the ranks do that."""
        return self._at_least(
            MIN_SILENCE_S if self._is_known and self._has_stepped else MIN_SILENCE_AT_FIRST_S, activity
        )

    def extend_limit(self, activity: RankActivity, limit_s: float) -> None:
        """Extend the limit of later groups, because a silence beyond `limit_s` was called a hang.

        The extension has a bound.
        """
        most_s = max(MAX_EXTENDED_S[activity], EXTENSION_FACTOR * FACTOR[activity] * self.longest_s)
        doubted_s = min(EXTENSION_FACTOR * limit_s, most_s)
        self._extended_s[activity] = max(self._extended_s[activity], doubted_s)

    def leave_s(self, activity: RankActivity, *, is_hang: bool) -> float:
        """Return how long a rank may take to leave a group that ended, as it may be in the middle of a step.

        `is_hang`: another node ended the group for a hang, so the rank has waited for long already.
        """
        least = MIN_SILENCE_S if is_hang or self._is_known else MIN_SILENCE_AT_FIRST_S
        return self._at_least(least, activity)

    def _at_least(self, least: dict[RankActivity, float], activity: RankActivity) -> float:
        return max(least[activity], FACTOR[activity] * self.longest_s, self._extended_s[activity])

    @property
    def _is_known(self) -> bool:
        return self._count >= MIN_STEPS

    def describe_silence(self, silent_s: float) -> str:
        longest = f"the longest before took {self.longest_s:.1f} s" if self.longest_s else "none was timed"
        return f"no step for {silent_s:.1f} s after step {self.step}; {longest}"
