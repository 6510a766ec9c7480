"""Find the job's own patterns in its log lines, in bounded time whatever the pattern."""

from __future__ import annotations

import re
import signal
from types import FrameType

from shoal.wire import LogRule, RuleAction

MAX_SEARCHED = 4096
RULE_BUDGET_S = 0.1
"""CPU time of one rule for the lines of one read, 64 KiB at most. One that needs more is dropped: it would
hold up stop, time limit and renewal. A search keeps every other thread waiting, and one renewal waits a
dozen times."""
MAX_DROPPED = 4
"""So many rules may be dropped for their time one by one; then all are: a job wrote them to waste it."""
COMPILE_S = 1.0
"""CPU time to compile all rules of a job, once. Those left then are dropped."""
BUDGET_S = 0.4
"""CPU time of all rules together for the lines of one read. Rules whose turn never comes miss those lines."""


DEVICE_FAULTS = (
    LogRule(match=r"uncorrectable ECC error", action=RuleAction.EXCLUDE_NODE),
    LogRule(match=r"NVRM: Xid .*: (?:48|63|64|74|79|94|95|119|120|140),", action=RuleAction.EXCLUDE_NODE),
    LogRule(match=r"GPU (?:is lost|has fallen off the bus)", action=RuleAction.EXCLUDE_NODE),
)
"""What CUDA, NVML and the driver say of a broken GPU, or of its memory or links: looked for in the log of
every job with GPUs. The program cannot mend it, and another start on the same device ends the same way."""


class _OutOfTime(Exception):
    pass


class LogRules:
    """Patterns still looked for, and the actions of those found. Main thread only: it uses SIGPROF."""

    def __init__(self, rules: tuple[LogRule, ...]) -> None:
        self.hits: list[RuleAction] = []
        self.complaints: list[str] = []
        """Sentences for the log, about rules that no longer count."""
        self._waiting: list[tuple[re.Pattern[str], RuleAction]] = []
        self._has_missed = False
        self._num_dropped = 0
        if rules:
            self._compile(rules)

    def _compile(self, rules: tuple[LogRule, ...]) -> None:
        """Nobody has compiled these before: some patterns take their time, which is the job's."""
        left_s = COMPILE_S
        signal.signal(signal.SIGPROF, _stop_searching)
        try:
            for rule in rules:
                if left_s <= 0:
                    self.complaints.append(
                        f"the log rules took over {COMPILE_S} s to compile: the rest is dropped"
                    )
                    return
                left_s -= self._compile_one(rule)
        finally:
            signal.signal(signal.SIGPROF, signal.SIG_IGN)

    def _compile_one(self, rule: LogRule) -> float:
        """Seconds of CPU time it took."""
        left_s = 0.0
        try:
            signal.setitimer(signal.ITIMER_PROF, RULE_BUDGET_S)
            try:
                pattern = re.compile(rule.match)
            finally:
                left_s, _ = signal.setitimer(signal.ITIMER_PROF, 0)
        except _OutOfTime:
            self.complaints.append(
                f"log rule {rule.match!r} took over {RULE_BUDGET_S} s to compile and is dropped"
            )
            return RULE_BUDGET_S
        except (re.error, OverflowError, RecursionError) as error:
            self.complaints.append(f"log rule {rule.match!r} is not a pattern: {error}")
        else:
            self._waiting.append((pattern, rule.action))
        return RULE_BUDGET_S - left_s

    @property
    def are_waiting(self) -> bool:
        """Whether lines still have to be searched."""
        return bool(self._waiting)

    def check(self, lines: list[bytes]) -> None:
        """Search the lines for every pattern not yet found."""
        if not self._waiting:
            return
        signal.signal(signal.SIGPROF, _stop_searching)
        left_s = BUDGET_S
        try:
            for pattern, action in list(self._waiting):
                if not self._waiting:
                    return
                if left_s <= 0:
                    self._miss()
                    return
                left_s -= self._search(pattern, action, lines)
        finally:
            signal.signal(signal.SIGPROF, signal.SIG_IGN)  # the default would be to die of a late one

    def _search(self, pattern: re.Pattern[str], action: RuleAction, lines: list[bytes]) -> float:
        """Seconds of CPU time it took."""
        left_s = 0.0
        try:
            signal.setitimer(signal.ITIMER_PROF, RULE_BUDGET_S)
            try:
                is_hit = any(pattern.search(line[:MAX_SEARCHED].decode("utf-8", "replace")) for line in lines)
            finally:
                left_s, _ = signal.setitimer(signal.ITIMER_PROF, 0)
        except _OutOfTime:
            self._drop(pattern, action)
            return RULE_BUDGET_S
        if is_hit:
            self._waiting.remove((pattern, action))
            self.hits.append(action)
        return RULE_BUDGET_S - left_s

    def _drop(self, pattern: re.Pattern[str], action: RuleAction) -> None:
        self._waiting.remove((pattern, action))
        self.complaints.append(f"log rule {pattern.pattern!r} took over {RULE_BUDGET_S} s and is dropped")
        self._num_dropped += 1
        if self._num_dropped == MAX_DROPPED and self._waiting:
            self.complaints.append(
                f"after {MAX_DROPPED} such log rules the other {len(self._waiting)} are dropped too"
            )
            self._waiting.clear()

    def _miss(self) -> None:
        if not self._has_missed:
            self._has_missed = True
            self.complaints.append(f"the log rules took over {BUDGET_S} s: some missed some lines")


def _stop_searching(signum: int, frame: FrameType | None) -> None:
    raise _OutOfTime
