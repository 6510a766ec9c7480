"""`docs/reference/cli.md` is the help of every command. `SHOAL_GOLDEN=write` renews it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from shoal.cli.main import COMMANDS
from tests.style.tree import ROOT
from tests.support.fakes.api_server import Shell

PAGE = ROOT / "docs" / "reference" / "cli.md"
HEAD = """\
# Every command

Generated from `--help`; after a change of a command type
`SHOAL_GOLDEN=write pytest tests/unit/docs/test_cli_reference.py` and read the difference.

Every command that prints data takes `--json`. Exit codes: 0 done · 1 `doctor` or `audit --verify` found
something · 2 wrong request · 3 wrong moment · 4 not allowed or not there · 5 refused by the engine · 6 nobody
answers · 70 a bug of ours · 130 interrupted. `run` ends with the job's own.
"""


def commands() -> Iterator[tuple[str, ...]]:
    """Return every command as it is typed: `("nodes", "cordon")`."""
    for name, (place, _) in COMMANDS.items():
        yield (name,)
        module, _, attribute = place.partition(":")
        if attribute == "app":
            app = import_module(f"shoal.cli.{module}").app
            yield from ((name, verb) for verb in app if not verb.startswith("-"))


def section(shell: Shell, arguments: tuple[str, ...]) -> str:
    result = shell(*arguments, "--help")
    assert result.code == 0, result.err
    text = "\n".join(line.rstrip() for line in result.out.strip().splitlines())
    return (
        f"\n## shoal {' '.join(arguments)}\n\n```text\n{text}\n```\n"
        if arguments
        else f"\n```text\n{text}\n```\n"
    )


def test_the_page_is_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shell = Shell(tmp_path, monkeypatch, capsys)
    page = HEAD + "".join(section(shell, command) for command in ((), *commands()))
    if os.environ.get("SHOAL_GOLDEN") == "write":
        PAGE.write_text(page, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page


def test_commands_of_commands_are_among_them() -> None:
    assert {("nodes", "declare-dead"), ("token", "revoke"), ("project", "add")} <= set(commands())
