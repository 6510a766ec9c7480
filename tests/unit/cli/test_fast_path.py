"""The fast path of `shoal run` reads what the command tree reads, or leaves it to the tree."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.cli.arguments import ONCE, REPEATED, SHORT, TypedRun, read_run
from shoal.cli.jobs.run import JobFlags
from shoal.cli.main import build_app

APP = build_app("run")
PROGRAM = ("--", "python", "train.py", "--lr", "1")
SPELLINGS = (*ONCE, *REPEATED, *SHORT, "--detach", "--json", "--exclusive", "--shared")
VALUES = st.sampled_from(["8", "2..4", "A=b c", "", "x,y", "=", "a=--b", "é", "H100:8", "0-9%2", "True"])
ODD_WORDS = st.sampled_from(
    [*SPELLINGS, "-x", "-5", "--name=a", "-nb", "-dx", "--no-json", "--help", "--gpu", "-", "run", "job.yaml"]
)


def by_tree(head: list[str]) -> tuple[dict[str, Any], bool, bool]:
    """Return what the tree reads; raise what it raises."""
    _, bound, _ = APP.parse_args(head, exit_on_error=False, print_error=False)
    arguments = bound.arguments
    assert arguments.get("file") is None
    flags = arguments["flags"].typed_flags() if "flags" in arguments else {}
    return flags, arguments.get("detach", False), arguments.get("json", False)


def agrees(typed: TypedRun, head: list[str]) -> bool:
    return by_tree(head) == (typed.flags, typed.should_detach, typed.should_print_json)


def test_fast_path_knows_every_flag_of_a_job() -> None:
    assert {*ONCE.values(), *REPEATED.values(), "exclusive", "shared"} == {
        field.name for field in dataclasses.fields(JobFlags)
    }
    repeated = {field.name for field in dataclasses.fields(JobFlags) if field.default == ()}
    assert set(REPEATED.values()) == repeated


@pytest.mark.parametrize("flag", [*ONCE, *REPEATED, "-n", "-p", "-e"])
def test_every_flag_with_a_value_is_read_by_the_fast_path(flag: str) -> None:
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
def test_fast_path_and_command_tree_read_the_same(arguments: list[tuple[str, ...]]) -> None:
    head = ["run", *(word for pair in arguments for word in pair)]
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
def test_unusual_forms_are_left_to_the_command_tree(argv: list[str]) -> None:
    assert read_run(argv) is None
