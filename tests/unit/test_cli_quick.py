"""`shoal run` read the quick way means what the command tree makes of it, or is left to the tree."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.cli.job_flags import JobFlags
from shoal.cli.main import build_app
from shoal.cli.quick import ONCE, REPEATED, SHORT, Typed, read_run

APP = build_app("run")
PROGRAM = ("--", "python", "train.py", "--lr", "1")
SPELLINGS = (*ONCE, *REPEATED, *SHORT, "--detach", "--json", "--exclusive", "--shared")
VALUES = st.sampled_from(["8", "2..4", "A=b c", "", "x,y", "=", "a=--b", "é", "H100:8", "0-9%2", "True"])
ODD_WORDS = st.sampled_from(
    [*SPELLINGS, "-x", "-5", "--name=a", "-nb", "-dx", "--no-json", "--help", "--gpu", "-", "run", "job.yaml"]
)


def by_tree(head: list[str]) -> tuple[dict[str, Any], bool, bool]:
    """What the tree reads; raises what it raises."""
    _, bound, _ = APP.parse_args(head, exit_on_error=False, print_error=False)
    told = bound.arguments
    assert told.get("file") is None
    flags = told["flags"].given() if "flags" in told else {}
    return flags, told.get("detach", False), told.get("json", False)


def agrees(typed: Typed, head: list[str]) -> bool:
    return by_tree(head) == (typed.flags, typed.should_detach, typed.should_print_json)


def test_the_quick_way_knows_every_flag_of_a_job() -> None:
    assert {*ONCE.values(), *REPEATED.values(), "exclusive", "shared"} == {
        field.name for field in dataclasses.fields(JobFlags)
    }
    repeated = {field.name for field in dataclasses.fields(JobFlags) if field.default == ()}
    assert set(REPEATED.values()) == repeated


@pytest.mark.parametrize("flag", [*ONCE, *REPEATED, "-n", "-p", "-e"])
def test_every_flag_with_a_value_is_read_the_quick_way(flag: str) -> None:
    typed = read_run(["run", flag, "3", "-d", *PROGRAM])
    assert typed is not None
    assert agrees(typed, ["run", flag, "3", "-d"])
    assert typed.program == PROGRAM[1:]


def test_a_switch_takes_no_value() -> None:
    typed = read_run(["run", "--exclusive", "--gpus", "1", *PROGRAM])
    assert typed is not None
    assert typed.flags == {"exclusive": True, "gpus": "1"}
    assert agrees(typed, ["run", "--exclusive", "--gpus", "1"])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.tuples(st.sampled_from(SPELLINGS), VALUES), st.tuples(ODD_WORDS)), max_size=5))
def test_what_is_read_the_quick_way_the_tree_reads_the_same(words: list[tuple[str, ...]]) -> None:
    head = ["run", *(word for pair in words for word in pair)]
    typed = read_run([*head, *PROGRAM])
    if typed is not None:
        assert agrees(typed, head)


@pytest.mark.parametrize(
    "argv",
    [
        ["run", "job.yaml", "--", "x"],
        ["run", "--help", "--", "x"],
        ["run", "--gpus", "--", "x"],
        ["run", "--no-such", "1", "--", "x"],
        ["run", "--name", "a", "--name", "b", "--", "x"],
        ["run", "--priority", "-5", "--", "x"],
        ["run", "-d"],
        ["queue", "--", "x"],
        ["--", "run"],
        [],
    ],
)
def test_what_is_unusual_is_left_to_the_tree(argv: list[str]) -> None:
    assert read_run(argv) is None
