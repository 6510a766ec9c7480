"""The tables of launchers' options, compared with the launchers' own parsers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.runtime.warm import launcher_config, launchers, options
from shoal.spec import launchers as at_submit

SHOW = """
import argparse, json
def show(self, *_, **__):
    options = [(action.option_strings, action.nargs) for action in self._actions if action.option_strings]
    print("\\n" + json.dumps([self.allow_abbrev, options]))
    raise SystemExit
argparse.ArgumentParser.parse_args = show
{import_of}
parse_args([])
"""


@pytest.mark.parametrize("name", options.TABLES)
def test_every_option_of_a_launcher_is_known(name: str) -> None:
    package = launchers.MODULE_OF[name].partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    code = SHOW.replace("{import_of}", launcher_config.IMPORTS[name])
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    has_abbreviations, real_options = json.loads(done.stdout.splitlines()[-1])
    table = options.TABLES[name]
    assert table.has_abbreviations == has_abbreviations
    for strings, nargs in real_options:
        is_flag = nargs == 0
        full = {text[2:].replace("_", "-") for text in strings if text.startswith("--")}
        assert full <= (table.flags if is_flag else table.values), strings
        letters = {text[1:] for text in strings if not text.startswith("--")}
        assert {table.letters[letter] for letter in letters} <= full, strings


def test_what_is_judged_at_submit_knows_the_same_flags_and_abbreviations() -> None:
    tables = options.TABLES.values()
    flags = {f"--{flag}" for table in tables for flag in table.flags}
    assert {flag for flag in at_submit.FLAGS if flag.startswith("--")} == flags
    for full, least in at_submit.SHORTEST.items():
        for table in tables:
            if table.has_abbreviations and full[2:] in table.values:
                assert (table.full(least[2:]), table.full(least[2:-1])) == (full[2:], None)


@pytest.mark.parametrize(
    ("name", "arguments", "option"),
    [
        ("torchrun", "--new-option train.py base.py", "--new-option"),
        ("torchrun", "--nproc-pernode=2 train.py", "--nproc-pernode=2"),
        ("torchrun", "--no train.py", "--no"),
        ("torchrun", "--standalone=1 train.py", "--standalone=1"),
        ("torchrun", "-x train.py", "-x"),
        ("accelerate-launch", "--num_proc 2 train.py", "--num_proc"),
    ],
)
def test_option_that_no_table_has_is_left_to_the_launcher(name: str, arguments: str, option: str) -> None:
    with pytest.raises(options.UnknownOption) as unclear:
        options.read(name, arguments.split())
    assert unclear.value.option == option


STUB = """
import argparse
def parse_args(words):
    parser = argparse.ArgumentParser()
    parser.add_argument("--new-option")
    parser.add_argument("--nproc-per-node")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs="...")
    return parser.parse_args(words)
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "torch" / "distributed"
    package.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "run.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("stub")
def test_launcher_of_another_version_says_where_its_program_is() -> None:
    arguments = ["--new-option", "a.py", "--nproc-per-node", "2", "tool", "b.py", "--new-option"]
    at = launcher_config.program_at(sys.executable, "torchrun", arguments, "--new-option")
    command = options.read("torchrun", arguments, at)
    assert command.rest == ["tool", "b.py", "--new-option"]
    assert command.value("nproc-per-node") == "2"
    assert command.before() == arguments[:at]


@pytest.mark.usefixtures("stub")
def test_option_that_the_launcher_does_not_take_either_is_refused_by_its_name() -> None:
    with pytest.raises(launchers.LauncherRefused, match="option `--nproc-pernode`: ") as refused:
        launcher_config.program_at(sys.executable, "torchrun", ["--nproc-pernode", "tool"], "--nproc-pernode")
    assert "unrecognized arguments" in refused.value.message
    assert "leave `--nproc-pernode` out" in refused.value.hint
