"""Health of the loops, the engine and its nodes.

`LoopHealth`: which loops fail, since when and why. A control plane that starts tries all loops at once.

`EngineOutages`: since when the engine does not answer. What it last said of its nodes is as old as that, or
older. A control plane that starts asks the engine before it answers requests, and says so if that takes long.
Whether an engine answered an earlier control plane is not known.

`MissingNodeTimes`: how long an answering engine has not listed a node, so that a hiccup is told from a
removal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from math import inf

import msgspec

from shoal.clock import Clock
from shoal.errors import ShoalError

MAX_FAILURE_TEXT = 300


class FailingLoop(msgspec.Struct, frozen=True, kw_only=True):
    """A loop whose last turn failed."""

    loop: str
    since: float
    """Time of the first failure in a row."""
    times: int
    why: str
    """Message of the last failure."""


class LoopHealth:
    """The result of each loop's last turn."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failing: dict[str, FailingLoop] = {}

    @property
    def failing(self) -> tuple[FailingLoop, ...]:
        """The failing loops, by name."""
        return tuple(failing for _, failing in sorted(self._failing.items()))

    def record_success(self, loop: str) -> None:
        self._failing.pop(loop, None)

    def record_failure(self, loop: str, error: Exception) -> None:
        before = self._failing.get(loop)
        why = error.message if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}"
        self._failing[loop] = FailingLoop(
            loop=loop,
            since=before.since if before else self._clock.now(),
            times=before.times + 1 if before else 1,
            why=why[:MAX_FAILURE_TEXT],
        )


MAX_OUTAGE_TEXT = 200
LATE_S = 3.0
"""An unanswered question older than this is shown to people. The engine may give the question up much later:
a Ray whose head is gone lets its callers wait, and so may a Ray on a busy machine, which is given 20 s.
"""


class EngineOutage(msgspec.Struct, frozen=True, kw_only=True):
    """A time in which the engine gives no answer."""

    since: float
    """Time of the first unanswered question in a row."""
    has_answered: bool
    """Whether the engine had answered this control plane before. If so, the known state of its nodes is as of
    `since`.
    """
    why: str
    """The first line of the error."""


class EngineOutages:
    """The result of the last question about nodes. Used on the event loop alone."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._has_answered = False
        self._open_questions: list[tuple[float, float]] = []
        """Start of each question that is under way: monotonic time and wall-clock time."""
        self.current: EngineOutage | None = None
        """The outage that decisions may rely on: the last question failed."""

    @property
    def reported(self) -> EngineOutage | None:
        """The outage to show to people: the current one, or one because an answer is late. No decision may
        rely on it, because a late answer may still come.
        """
        asked_at, since = min(self._open_questions, default=(inf, inf))
        late_s = self._clock.monotonic() - asked_at
        if self.current is not None or late_s < LATE_S:
            return self.current
        why = f"no answer for {late_s:.0f} s so far"
        return EngineOutage(since=since, has_answered=self._has_answered, why=why)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Mark a question as under way while the block lasts. The block records the answer."""
        question = self._clock.monotonic(), self._clock.now()
        self._open_questions.append(question)
        try:
            yield
        finally:
            self._open_questions.remove(question)

    def record_answer(self) -> None:
        self._has_answered = True
        self.current = None

    def record_failure(self, error: str) -> None:
        asked_at = min((at for _, at in self._open_questions), default=self._clock.now())
        since = self.current.since if self.current else asked_at
        self.current = EngineOutage(since=since, has_answered=self._has_answered, why=first_line(error))

    def record_no_answer_yet(self, reason: str) -> None:
        """Record that the first answer is late or will never come. Until it comes, the known nodes are those
        of an earlier control plane.
        """
        if not self._has_answered and self.current is None:
            self.record_failure(reason)


def first_line(error: str) -> str:
    """Return the first line of an engine's error, shortened to `MAX_OUTAGE_TEXT` characters."""
    first = next((line.strip() for line in error.splitlines() if line.strip()), "")
    return first if len(first) <= MAX_OUTAGE_TEXT else f"{first[: MAX_OUTAGE_TEXT - 3]}..."


GONE_S = 600.0
"""A Slurm that reads its configuration, or a Ray whose head is back before its workers, lists only some of
its nodes for seconds, at worst for minutes.
"""
FORGOTTEN_S = 86_400.0
"""If machines come and go under ever new names, the records of those that went must not pile up."""
MAX_GAP_S = 60.0
"""The most time that one answer counts for: two answers an hour apart say nothing about the hour."""


class MissingNodeTimes:
    """By node: seconds of answers that did not name it. In memory, so a control plane that starts counts from
    0.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._answered_at: float | None = None
        self._absent_s: dict[str, float] = {}

    def record_answer(self, recorded: Iterable[str], listed: Collection[str]) -> None:
        """Record which nodes an answer listed. An engine that lists none is still coming up, so that counts
        as no answer.
        """
        if not listed:
            self.record_failure()
            return
        now = self._clock.monotonic()
        since = min(now - self._answered_at, MAX_GAP_S) if self._answered_at is not None else 0.0
        self._answered_at = now
        before = self._absent_s
        self._absent_s = {
            name: before[name] + since if name in before else 0.0 for name in recorded if name not in listed
        }

    def record_failure(self) -> None:
        """Record that no answer came. The time until the next answer does not count."""
        self._answered_at = None

    def is_gone(self, name: str) -> bool:
        return self._absent_s.get(name, 0.0) >= GONE_S

    def is_long_gone(self, name: str) -> bool:
        return self._absent_s.get(name, 0.0) >= FORGOTTEN_S
