"""Tell ranks that hang from ranks that are slow, by the pace they have shown themselves. Pure.

How long a silence may be depends on what is seen while it lasts. A rank that somebody stopped with a signal
makes no step, however long one waits: that is called a hang after some steps' time. One that does nothing may
wait for a disk or for data; one that works may evaluate or compile; one that waits for others may wait for
such a one. To end what is healthy is worse than to wait.
"""

from __future__ import annotations

from enum import Enum, auto

MIN_STEPS = 10
"""Before so many steps little is known about their length: the first ones compile, load and allocate."""
LEAVE_S = 5.0
"""For who has nothing to finish, to come out of a group that ended."""
BUSY_SHARE = 0.05
"""Of one processor: more is work."""


class Doing(Enum):
    """What is seen of a node's ranks while there is no step."""

    STOPPED = auto()
    """One of them was stopped with a signal, and not by us."""
    NOTHING = auto()
    WAITING = auto()
    """The same, and all of them stand where ranks wait for others."""
    WORK = auto()


LEAST_S = {Doing.STOPPED: 1.0, Doing.NOTHING: 20.0, Doing.WAITING: 600.0, Doing.WORK: 1800.0}
"""No shorter silence is a hang. 600 s is also how long collectives wait, unless their program says more."""
UNKNOWN_LEAST_S = LEAST_S | {Doing.STOPPED: 5.0, Doing.NOTHING: 60.0}
"""The same, while little is known about the steps."""
FACTOR = {Doing.STOPPED: 8.0, Doing.NOTHING: 8.0, Doing.WAITING: 8.0, Doing.WORK: 60.0}
"""Nor is one of fewer than so many of the longest steps."""
DOUBT = 2.0
"""A silence that was called a hang may have been none: the next one may be longer by this factor."""
MOST_DOUBTED_S = {
    Doing.STOPPED: LEAST_S[Doing.WORK],
    Doing.NOTHING: LEAST_S[Doing.WORK],
    Doing.WAITING: 4 * LEAST_S[Doing.WAITING],
    Doing.WORK: 4 * LEAST_S[Doing.WORK],
}
"""But not for ever: a job that hangs time and again is to be found hanging in the end."""


class Pace:
    """The steps of a node's groups: at `step` since `since`, the longest took `longest_s`.

    `step` is -1 while nobody has looked at the group there is now, or one of it is new to it.
    """

    def __init__(self) -> None:
        self.step = -1
        self.since = 0.0
        self.longest_s = 0.0
        self._count = 0
        self._has_looked = self._has_stepped = self._is_first_timed = False
        self._worked_s = self._counted_from = 0.0
        self._doubted_s = dict.fromkeys(Doing, 0.0)

    def begin(self, *, is_after_hang: bool = False) -> None:
        """Another group: what is known of its steps stays known, the time until its first one is no step.

        `is_after_hang`: it is one, then. What was called a hang may have been a long step, an evaluation say,
        that is made again now: it is learned from, and called so once.
        """
        self.step, self._has_looked, self._has_stepped = -1, False, False
        self._is_first_timed = is_after_hang

    def look(self, now: float, step: int, worked_s: float, *, has_stepped: bool = True) -> None:
        """`step`: the lowest of the node's ranks; `worked_s`: what they have worked together so far.

        `has_stepped`: they made that step in this group, and have not brought it along.
        """
        if self._has_looked and (step, has_stepped) == (self.step, self._has_stepped):
            return
        if self._has_stepped or (self._has_looked and self._is_first_timed):
            self.longest_s = max(self.longest_s, now - self.since)
        # Several steps may lie between two looks. Those before the first look were nobody's to time.
        self._count += max(1, step - self.step) if self._has_stepped else int(has_stepped)
        self.step, self._has_looked, self._has_stepped = step, True, has_stepped
        self.rest(now, worked_s)

    def rest(self, now: float, worked_s: float) -> None:
        """The time up to now is nobody's: it is no silence, and no step is longer by it."""
        self.since = now
        self.disregard(now, worked_s)

    def disregard(self, now: float, worked_s: float) -> None:
        """What was worked up to now was not only the ranks' work: it says nothing about them."""
        self._counted_from, self._worked_s = now, worked_s

    def verdict(self, now: float, worked_s: float, *, is_stopped: bool) -> Doing | None:
        """What the ranks do, where the silence is too long for it: a hang. None: all is well."""
        if not self._has_looked or not (self._is_known or self._has_stepped):
            return None
        # Of one step alone nobody knows the length: who waits in the second has the time of who works.
        is_idle = self.longest_s > 0.0 and self.is_idle(now, worked_s)
        doing = Doing.NOTHING if is_idle else Doing.WORK
        kinds = [Doing.STOPPED, doing] if is_stopped else [doing]
        return next((kind for kind in kinds if now - self.since > self.limit_s(kind)), None)

    def is_idle(self, now: float, worked_s: float) -> bool:
        """Whether nobody has been at work since the last step, in a group that has made one."""
        counted_s = now - self._counted_from
        # Idle for as long as a hang is idle: to wait for a disk after long work takes seconds, too.
        is_counted = self._counted_from == self.since or counted_s > self.limit_s(Doing.NOTHING)
        # Before its first step a group waits for the model, which may take longer than many short steps.
        return self._has_stepped and is_counted and worked_s - self._worked_s <= BUSY_SHARE * counted_s

    def limit_s(self, doing: Doing) -> float:
        """How long a silence may be while they do that."""
        return self._at_least(LEAST_S if self._is_known and self._has_stepped else UNKNOWN_LEAST_S, doing)

    def doubt(self, doing: Doing, limit_s: float) -> None:
        """A silence beyond this limit was called a hang, for what they did: in later groups a longer one is
        none, up to a bound.
        """
        most_s = max(MOST_DOUBTED_S[doing], DOUBT * FACTOR[doing] * self.longest_s)
        doubted_s = min(DOUBT * limit_s, most_s)
        self._doubted_s[doing] = max(self._doubted_s[doing], doubted_s)

    def leave_s(self, doing: Doing, *, is_hang: bool) -> float:
        """How long a rank may take to come out of a group that ended: it may be in the middle of a step.

        `is_hang`: another node ended it for one; they have waited for long already.
        """
        least = LEAST_S if is_hang or self._is_known else UNKNOWN_LEAST_S
        return self._at_least(least, doing)

    def _at_least(self, least: dict[Doing, float], doing: Doing) -> float:
        return max(least[doing], FACTOR[doing] * self.longest_s, self._doubted_s[doing])

    @property
    def _is_known(self) -> bool:
        return self._count >= MIN_STEPS

    def told(self, silent_s: float) -> str:
        longest = f"the longest before took {self.longest_s:.1f} s" if self.longest_s else "none was timed"
        return f"no step for {silent_s:.1f} s after step {self.step}; {longest}"
