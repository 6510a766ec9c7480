"""Find the job's own patterns in its log lines, in bounded time whatever the pattern."""

from __future__ import annotations

import re
import signal
from types import FrameType

from shoal.wire import LogRule, RuleAction

MAX_SEARCHED = 4096
BUDGET_S = 0.5
"""For the lines of one read. A pattern that needs more is dropped: it would hold up stop and renewal."""


class _OutOfTime(Exception):
    pass


class LogRules:
    """Patterns still looked for, and the actions of those found. Main thread only: it uses SIGALRM."""

    def __init__(self, rules: tuple[LogRule, ...]) -> None:
        self.hits: list[RuleAction] = []
        self.complaints: list[str] = []
        """Sentences for the log, about rules that no longer count."""
        self._waiting: list[tuple[re.Pattern[str], RuleAction]] = []
        for rule in rules:
            try:
                self._waiting.append((re.compile(rule.match), rule.action))
            except re.error as error:
                self.complaints.append(f"log rule `{rule.match}` is not a pattern: {error}")

    def check(self, lines: list[bytes]) -> None:
        """Search the lines for every pattern not yet found."""
        if not self._waiting:
            return
        before = signal.signal(signal.SIGALRM, _stop_searching)
        try:
            for pattern, action in list(self._waiting):
                self._search(pattern, action, lines)
        finally:
            signal.signal(signal.SIGALRM, before)

    def _search(self, pattern: re.Pattern[str], action: RuleAction, lines: list[bytes]) -> None:
        try:
            signal.setitimer(signal.ITIMER_REAL, BUDGET_S)
            try:
                is_hit = any(pattern.search(line[:MAX_SEARCHED].decode("utf-8", "replace")) for line in lines)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except _OutOfTime:
            self._waiting.remove((pattern, action))
            self.complaints.append(f"log rule `{pattern.pattern}` took over {BUDGET_S} s and is dropped")
            return
        if is_hit:
            self._waiting.remove((pattern, action))
            self.hits.append(action)


def _stop_searching(signum: int, frame: FrameType | None) -> None:
    raise _OutOfTime
