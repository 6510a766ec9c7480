"""Log rules: first hits, and patterns that never finish."""

from __future__ import annotations

from shoal.runtime.process.log_rules import LogRules
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


def test_pattern_that_never_finishes_is_dropped_and_others_still_work() -> None:
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


def test_rules_that_take_long_to_compile_are_dropped_and_named() -> None:
    costly = r"(?i)[\x00-\U0010ffff][\x01-\U0010fffe]" + r"[!-\377]" * 110
    many = tuple(LogRule(match=f"{costly}{number}", action=STOP) for number in range(500))
    rules = LogRules((LogRule(match="needle", action=STOP), *many))
    assert "to compile" in rules.complaints[-1]
    assert len(rules.complaints) < 50
    rules.check([b"a needle"])
    assert STOP in rules.hits


def test_pattern_that_does_not_compile_is_named() -> None:
    rules = LogRules(
        (LogRule(match="(" * 5000 + ")" * 5000, action=STOP), LogRule(match="a{9999999999}", action=STOP))
    )
    assert len(rules.complaints) == 2
    assert all("is not a pattern" in complaint for complaint in rules.complaints)
