"""The rules that search a task's log: they take bounded time, whatever patterns the job wrote."""

from __future__ import annotations

import re
import time
from functools import partial

from shoal.runtime.process.cpu_limit import OutOfCpuTime, run_limited
from shoal.wire import LogRule, RuleAction

MAX_SEARCHED = 4096
RULE_BUDGET_S = 0.1
"""Limit of CPU time for one rule and the lines of one read, which are 64 KiB at most. A rule that needs more
is dropped, because it would delay a stop, the time limit and the lease renewal. A search blocks every other
thread, and one renewal has to wait for a dozen of them.
"""
MAX_DROPPED = 4
"""After this many rules were dropped for their time, all are: the job wrote them to waste time."""
COMPILE_S = 1.0
"""Limit of CPU time to compile all rules of a job, once. Rules that are left then are dropped."""
BUDGET_S = 0.4
"""Limit of CPU time for all rules and the lines of one read. Rules without a turn miss those lines."""


DEVICE_FAULTS = (
    LogRule(match=r"uncorrectable ECC error", action=RuleAction.EXCLUDE_NODE),
    LogRule(match=r"NVRM: Xid .*: (?:48|63|64|74|79|94|95|119|120|140),", action=RuleAction.EXCLUDE_NODE),
    LogRule(match=r"GPU (?:is lost|has fallen off the bus)", action=RuleAction.EXCLUDE_NODE),
)
"""Messages by which CUDA, NVML and the driver report a broken GPU, or broken memory or links of one. Shoal
looks for them in the log of every job with GPUs. The program cannot repair it, and another start on the same
device ends the same way.
"""


class LogRules:
    """Patterns that are still searched for, and the actions of those found. Main thread only."""

    def __init__(self, rules: tuple[LogRule, ...]) -> None:
        self.hits: list[RuleAction] = []
        self.complaints: list[str] = []
        """Sentences for the log about rules that were dropped."""
        self._waiting: list[tuple[re.Pattern[str], RuleAction]] = []
        self._has_missed = False
        self._num_dropped = 0
        if rules:
            self._compile(rules)

    def _compile(self, rules: tuple[LogRule, ...]) -> None:
        """Compile the rules within a limit: some patterns take long to compile, and the job chose them."""
        until = time.process_time() + COMPILE_S
        for rule in rules:
            if time.process_time() > until:
                self.complaints.append(
                    f"the log rules took over {COMPILE_S} s to compile: the rest is dropped"
                )
                return
            self._compile_one(rule)

    def _compile_one(self, rule: LogRule) -> None:
        try:
            pattern = run_limited(partial(re.compile, rule.match), RULE_BUDGET_S)
        except OutOfCpuTime:
            self.complaints.append(
                f"log rule {rule.match!r} took over {RULE_BUDGET_S} s to compile and is dropped"
            )
        except (re.error, OverflowError, RecursionError) as error:
            self.complaints.append(f"log rule {rule.match!r} is not a pattern: {error}")
        else:
            self._waiting.append((pattern, rule.action))

    @property
    def has_pending(self) -> bool:
        """Whether there are patterns to search for."""
        return bool(self._waiting)

    def check(self, lines: list[bytes]) -> None:
        """Search the lines for every pattern that was not found before."""
        if not self._waiting:
            return
        until = time.process_time() + BUDGET_S
        for pattern, action in list(self._waiting):
            if not self._waiting:
                return
            if time.process_time() > until:
                self._miss()
                return
            self._search(pattern, action, lines)

    def _search(self, pattern: re.Pattern[str], action: RuleAction, lines: list[bytes]) -> None:
        try:
            is_hit = run_limited(partial(_has_match, pattern, lines), RULE_BUDGET_S)
        except OutOfCpuTime:
            self._drop(pattern, action)
            return
        if is_hit:
            self._waiting.remove((pattern, action))
            self.hits.append(action)

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


def _has_match(pattern: re.Pattern[str], lines: list[bytes]) -> bool:
    return any(pattern.search(line[:MAX_SEARCHED].decode("utf-8", "replace")) for line in lines)
