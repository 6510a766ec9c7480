"""Patterns of log rules: a plainly wrong pattern is refused at submit, without compiling it."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.spec import parse_job
from shoal.spec.text import checked_pattern

GOOD = (
    *("Xid [0-9]+", "a|b", "^(NCCL|gloo).*error$", "[]()]", "[^]]+", r"\(", r"[\]]", "a{2,3}", "a{,3}", "{"),
    *("x{a}", "(?i)oom", "(?:a|b)+?", "(?P<n>a)(?P=n)", "(?<!a)b", "(?x) a # (", "(?# ( )a", "a**"[:2]),
)
BAD = ("(", ")", "[a", "a\\", "*a", "(+)", "a|?", "(a))", "a{99999999999}", "(" * 490 + ")" * 490)


@pytest.mark.parametrize("pattern", GOOD)
def test_pattern_that_python_compiles_is_accepted(pattern: str) -> None:
    re.compile(pattern)
    assert checked_pattern(pattern) == pattern


@pytest.mark.parametrize("pattern", BAD)
def test_plainly_wrong_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="is not a regular expression"):
        checked_pattern(pattern)


@given(st.text(alphabet="ab()[]^$|*+?{}0,\\.-!:<=#x", max_size=12))
def test_nothing_that_python_compiles_is_refused(pattern: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # sets within sets, which Python may read differently one day
            re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return
    assert checked_pattern(pattern) == pattern


def test_no_pattern_of_a_spec_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_ = re._compile  # type: ignore[attr-defined]

    def count(pattern: Any, flags: int = 0) -> Any:
        compiled.append(pattern)
        return compile_(pattern, flags)

    monkeypatch.setattr(re, "_compile", count)
    costly = r"(?i)[\x00-\U0010ffff][\x01-\U0010fffe]" + r"[!-\377]" * 110
    rules = {f"{costly}{number}": "exclude_node" for number in range(64)}
    assert len(parse_job({"run": "x", "log_rules": rules}).log_rules) == 64
    assert not [pattern for pattern in compiled if str(pattern).startswith(costly)]
