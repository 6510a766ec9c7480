"""What Shoal tells people to type can be typed: the commands are there, and so are their options."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator

import pytest
from cyclopts import CoercionError, CycloptsError, MissingArgumentError

from shoal.cli.main import COMMANDS, build_app
from tests.style.tree import ROOT

QUOTED = re.compile(r"`shoal ([a-z-][^`]*)`")
BARE = re.compile(r"shoal ([a-z-].*)", re.DOTALL)


def text_of(node: ast.expr) -> str:
    """The string with `X` for what is filled in; empty for what is no string."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) if isinstance(part, ast.Constant) else "X" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def commands_in(tree: ast.AST) -> Iterator[str]:
    """Everything in backticks, and hints that are a command as a whole."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr | ast.Constant):
            yield from (match.strip() for match in QUOTED.findall(text_of(node)))
        if isinstance(node, ast.keyword) and node.arg == "hint":
            whole = BARE.fullmatch(text_of(node.value))
            if whole is not None and "`" not in whole[1]:
                yield whole[1].strip()


def all_commands() -> list[str]:
    found: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        found.update(commands_in(ast.parse(path.read_text())))
    return sorted(found)


def complaint(command: str) -> str | None:
    """Why it cannot be typed. A placeholder is no value, and a command may be named without its arguments."""
    head = shlex.split(re.split(r" -- | \| ", command)[0])
    if head[0] not in COMMANDS and not head[0].startswith("--"):
        return f"no command `{head[0]}`"
    try:
        build_app(head[0]).parse_args(head, exit_on_error=False, print_error=False)
    except (MissingArgumentError, CoercionError):
        return None
    except CycloptsError as error:
        return str(error)
    return None


@pytest.mark.parametrize("command", all_commands())
def test_what_people_are_told_to_type_can_be_typed(command: str) -> None:
    assert complaint(command) is None


@pytest.mark.parametrize("command", ["up --port 0", "project add-member", "fly", "run --gpu-count 2 -- x"])
def test_a_command_that_does_not_exist_is_noticed(command: str) -> None:
    assert complaint(command) is not None
