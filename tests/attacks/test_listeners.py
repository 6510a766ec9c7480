"""Row 53 holds on every listener: one that is new needs a row that says what bounds it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import shoal
from tests.attacks.listeners import LISTENERS
from tests.style.tree import ROOT

PACKAGE = Path(shoal.__file__).parent
ALWAYS = frozenset(
    {
        *("create_server", "create_unix_server", "start_server", "start_unix_server", "accept"),
        *("HTTPServer", "ThreadingHTTPServer", "TCPServer", "UnixStreamServer", "connect_accepted_socket"),
        *("create_tcp_listener", "create_unix_listener", "run_server"),
    }
)
NOT_SOCKETS = frozenset(
    {
        "store/postgres.py",  # an event of SQLAlchemy
        "runtime/share.py",  # signals of a node agent
        "runtime/rank/loop.py",  # a signal
        "engines/local/engine.py",  # a file that changes
        "serving/neighbours.py",  # datagrams of a socket pair
        *("cli/serve.py", "cli/run.py", "cli/services.py", "cli/submit.py"),  # they call api/server.py
    }
)


def calls(path: Path) -> set[str]:
    """Names of functions and methods that the file calls."""
    found = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    names = {one.attr for one in found if isinstance(one, ast.Attribute)}
    return names | {one.id for one in found if isinstance(one, ast.Name)}


def files() -> dict[str, set[str]]:
    return {path.relative_to(PACKAGE).as_posix(): calls(path) for path in PACKAGE.rglob("*.py")}


def test_every_file_that_listens_has_a_row_that_says_what_bounds_it() -> None:
    found = {
        name for name, called in files().items() if name not in NOT_SOCKETS and called & {*ALWAYS, "listen"}
    }
    assert found == set(LISTENERS)


@pytest.mark.parametrize("name", sorted(LISTENERS))
def test_what_a_row_refers_to_is_there(name: str) -> None:
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
OURS_IN_OTHER_WORDS = ["serving/head.py", "spec/human.py"]
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
