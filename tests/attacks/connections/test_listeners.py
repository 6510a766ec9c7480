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
        *("create_tcp_listener", "create_unix_listener", "run_server"),
    }
)
NOT_SOCKETS = frozenset(
    {
        "store/postgres.py",  # an event of SQLAlchemy
        "runtime/supervisor/task_run.py",  # signals of a node agent
        "runtime/rank/loop.py",  # a signal
        "engines/local/engine.py",  # a file that changes
        "engines/fake/engine.py",  # a submission to a fake cluster
        "serving/peers.py",  # datagrams of a socket pair
        # its simulated cluster accepts submissions
        *(
            "cli/control_plane/server.py",
            "cli/jobs/run.py",
            "cli/services.py",
            "cli/jobs/submit.py",
        ),  # they call api/http/server.py
    }
)


def calls(path: Path) -> set[str]:
    """Return the names of functions and methods that the file calls."""
    functions = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    names = {function.attr for function in functions if isinstance(function, ast.Attribute)}
    return names | {function.id for function in functions if isinstance(function, ast.Name)}


def files() -> dict[str, set[str]]:
    return {path.relative_to(PACKAGE).as_posix(): calls(path) for path in PACKAGE.rglob("*.py")}


def test_every_file_that_listens_has_a_row_that_says_what_bounds_it() -> None:
    listeners = {
        name for name, called in files().items() if name not in NOT_SOCKETS and called & {*ALWAYS, "listen"}
    }
    assert listeners == set(LISTENERS)


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
