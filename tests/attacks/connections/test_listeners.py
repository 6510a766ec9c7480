"""Row 53 holds on every listener: a new one needs a row that says what bounds it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import shoal
from tests.attacks.connections.listeners import LISTENERS
from tests.style.tree import ROOT

PACKAGE = Path(shoal.__file__).parent
ALWAYS = frozenset(
    {
        *("create_server", "create_unix_server", "start_server", "start_unix_server", "accept"),
        *("HTTPServer", "ThreadingHTTPServer", "TCPServer", "UnixStreamServer", "connect_accepted_socket"),
        *("create_tcp_listener", "create_unix_listener", "run_server", "TCPStore"),
    }
)
LISTENING_TEXT = "bind fd@"
"""How HAProxy's configuration, which one of our files writes, names a socket that it gets."""
NOT_SOCKETS = frozenset(
    {
        ("store/postgres.py", "listen"),  # an event of SQLAlchemy
        ("runtime/rank/loop.py", "listen"),  # a signal
        ("engines/local/engine.py", "listen"),  # a file that changes
        ("engines/fake/engine.py", "accept"),  # a submission to a fake cluster
        ("cli/control_plane/server.py", "listen"),  # this and the next three call api/http/server.py
        ("cli/jobs/run.py", "start_server"),
        ("cli/jobs/submit.py", "start_server"),
        ("cli/services.py", "start_server"),
    }
)
"""Calls by file and name that have the name of a listener's call, and are none."""


def calls(path: Path) -> set[str]:
    """Return the names of functions and methods that the file calls."""
    functions = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    names = {function.attr for function in functions if isinstance(function, ast.Attribute)}
    return names | {function.id for function in functions if isinstance(function, ast.Name)}


def listening_calls() -> set[tuple[str, str]]:
    """Return each file of ours with the name of a call, or the text, by which it listens."""
    pairs = set()
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        pairs |= {(name, called) for called in calls(path) & {*ALWAYS, "listen"}}
        pairs |= {(name, LISTENING_TEXT)} if LISTENING_TEXT in path.read_text() else set()
    return pairs


def test_every_file_that_listens_has_a_row_that_says_what_bounds_it() -> None:
    assert {name for name, _ in listening_calls() - NOT_SOCKETS} == set(LISTENERS)


def test_every_call_that_is_said_to_be_no_listener_exists() -> None:
    assert listening_calls() >= NOT_SOCKETS


@pytest.mark.parametrize("name", sorted(LISTENERS))
def test_row_refers_to_existing_tests_and_files(name: str) -> None:
    row = LISTENERS[name]
    for word in row.bounded_by.replace(",", " ").replace(";", " ").split():
        if word.startswith("tests/"):
            assert (ROOT / word).is_file(), word
        elif word.endswith(".py"):
            assert word in LISTENERS, word


def test_no_pattern_that_a_caller_sent_is_compiled_outside_of_the_jobs_own_processes() -> None:
    """Every call of `re` has a pattern of ours: a text, or a name in capitals."""
    callers = [
        f"{name}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        if not (name := path.relative_to(PACKAGE).as_posix()).startswith(ELSEWHERE)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and _is_of_re(node.func) and not _is_ours(node.args[0])
    ]
    assert sorted(line.partition(":")[0] for line in callers) == OURS_IN_OTHER_WORDS, callers


ELSEWHERE = ("runtime/", "cli/", "client/", "cluster/", "sim/")
OURS_IN_OTHER_WORDS = ["serving/proxy/request_head.py", "spec/text.py"]
"""Built from a constant; given by the spec's own models."""


def _is_of_re(called: ast.expr) -> bool:
    return (
        isinstance(called, ast.Attribute)
        and isinstance(called.value, ast.Name)
        and called.value.id == "re"
        and called.attr != "escape"  # it compiles nothing
    )


def _is_ours(pattern: ast.expr) -> bool:
    if isinstance(pattern, ast.Name):
        return pattern.id.strip("_").isupper()
    if isinstance(pattern, ast.JoinedStr):
        return all(_is_ours(part.value) for part in pattern.values if isinstance(part, ast.FormattedValue))
    if isinstance(pattern, ast.BinOp):
        return _is_ours(pattern.left) and _is_ours(pattern.right)
    return isinstance(pattern, ast.Constant)
