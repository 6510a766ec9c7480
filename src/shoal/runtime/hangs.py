"""Tell ranks that hang from ranks that are slow, by the pace they have shown themselves. Pure.

No step for many times the longest one so far, and nobody at work: a hang. Where processors are busy all the
same (an evaluation, or a device that is waited for in a loop) only a much longer silence is one: to end what
is healthy is worse than to wait.
"""

from __future__ import annotations

MIN_STEPS = 10
"""Before so many steps nothing is known about their length: the first ones compile, load and allocate."""
IDLE_FACTOR, IDLE_S = 8.0, 1.0
BUSY_FACTOR, BUSY_S = 60.0, 120.0
LEAVE_S, UNKNOWN_LEAVE_S = 5.0, 60.0
BUSY_SHARE = 0.05
"""Of one processor: more is work."""


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
        self._cpu_s = self._counted_from = 0.0

    def begin(self, *, is_after_hang: bool = False) -> None:
        """Another group: what is known of its steps stays known, the time until its first one is no step.

        `is_after_hang`: it is one, then. What was called a hang may have been a long step, an evaluation say,
        that is made again now: it is learned from, and called so once.
        """
        self.step, self._has_looked, self._has_stepped = -1, False, False
        self._is_first_timed = is_after_hang

    def look(self, now: float, step: int, cpu_s: float, *, has_stepped: bool = True) -> None:
        """`step`: the lowest of the node's ranks; `cpu_s`: what they have used together so far.

        `has_stepped`: they made that step in this group, and have not brought it along.
        """
        if self._has_looked and (step, has_stepped) == (self.step, self._has_stepped):
            return
        if self._has_stepped or (self._has_looked and self._is_first_timed):
            self.longest_s = max(self.longest_s, now - self.since)
        # Several steps may lie between two looks. Those before the first look were nobody's to time.
        self._count += max(1, step - self.step) if self._has_stepped else int(has_stepped)
        self.step, self.since, self._has_looked, self._has_stepped = step, now, True, has_stepped
        self._counted_from, self._cpu_s = now, cpu_s

    def disregard(self, now: float, cpu_s: float) -> None:
        """What was used up to now is not only the ranks': it says nothing about them."""
        self._counted_from, self._cpu_s = now, cpu_s

    def silent_s(self, now: float, cpu_s: float, share: float = 1.0) -> float | None:
        """For how long there was no step, if that is a hang or such a share of one; None: all is well."""
        if self._count < MIN_STEPS or not self._has_looked:
            return None
        silence = now - self.since
        if silence <= 0.0:
            return None
        return silence if silence > share * self.limit_s(now, cpu_s) else None

    def limit_s(self, now: float, cpu_s: float) -> float:
        """How long a silence may be."""
        counted_s = now - self._counted_from
        # Idle for as long as a hang is idle: to wait for a disk after long work takes seconds, too.
        is_known = self._counted_from == self.since or counted_s > max(IDLE_S, IDLE_FACTOR * self.longest_s)
        # Before its first step a group waits for the model, which may take longer than many short steps.
        is_idle = self._has_stepped and is_known and cpu_s - self._cpu_s <= BUSY_SHARE * counted_s
        return max(IDLE_S, IDLE_FACTOR * self.longest_s) if is_idle else self.busy_s()

    def busy_s(self) -> float:
        """How long a silence may be while somebody is at work."""
        return max(BUSY_S, BUSY_FACTOR * self.longest_s)

    def leave_s(self) -> float:
        """How long a rank may take to come out of a group that ended: it may be in the middle of a step."""
        least = LEAVE_S if self._count >= MIN_STEPS else UNKNOWN_LEAVE_S
        return max(least, IDLE_FACTOR * self.longest_s)

    def told(self, silent_s: float) -> str:
        longest = f"the longest before took {self.longest_s:.1f} s"
        return f"no step for {silent_s:.1f} s after step {self.step}; {longest}"
