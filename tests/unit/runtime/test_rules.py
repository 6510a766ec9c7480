"""Log rules: first hits, and patterns that would never end."""

from __future__ import annotations

from shoal.runtime.rules import LogRules
from shoal.wire import LogRule, RuleAction

EXCLUDE = RuleAction.EXCLUDE_NODE
STOP = RuleAction.STOP_RETRIES


def test_first_hit_of_each_rule_is_noted_once() -> None:
    rules = LogRules((LogRule(match="Xid [0-9]+", action=EXCLUDE), LogRule(match="^bad", action=STOP)))
    rules.check([b"fine", b"NVRM: Xid 79"])
    rules.check([b"NVRM: Xid 80", b"not bad"])
    assert rules.hits == [EXCLUDE]
    rules.check([b"bad data"])
    assert rules.hits == [EXCLUDE, STOP]


def test_pattern_that_never_finishes_is_dropped_and_the_others_still_work() -> None:
    rules = LogRules((LogRule(match="(a+)+$", action=EXCLUDE), LogRule(match="end", action=STOP)))
    rules.check([b"a" * 60 + b"!", b"end"])
    assert rules.hits == [STOP]
    assert "took over" in rules.complaints[0]


def test_only_the_beginning_of_a_huge_line_is_searched() -> None:
    rules = LogRules((LogRule(match="needle", action=STOP),))
    rules.check([b"x" * 5000 + b"needle"])
    assert rules.hits == []


def test_invalid_pattern_is_a_complaint_and_not_a_crash() -> None:
    rules = LogRules((LogRule(match="(", action=STOP),))
    rules.check([b"("])
    assert "is not a pattern" in rules.complaints[0]
