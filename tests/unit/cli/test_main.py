"""Error sentences, exit codes that scripts can rely on, and a fast start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal import __version__
from shoal.cli.jobs import queue as queue_command
from shoal.cli.main import COMMANDS, build_app, run_command
from tests.support.fakes.api_server import TOKEN, FakeApiServer, Shell, job_view, running_fake

HEAVY = (
    "pydantic",
    "rich",
    "yaml",
    "sqlalchemy",
    "fastapi",
    "uvicorn",
    "structlog",
    "asyncio",
    "httpx",
    "http.client",
    "email",
    "ssl",
    "alembic",
)


@pytest.fixture
def fake() -> Iterator[FakeApiServer]:
    with running_fake() as server:
        yield server


@pytest.fixture
def shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake: FakeApiServer
) -> Shell:
    new_shell = Shell(tmp_path, monkeypatch, capsys)
    new_shell.connect_to(fake)
    return new_shell


def imported(*argv: str, env: dict[str, str]) -> set[str]:
    """Return every module that `shoal ARGV` loads in a fresh process."""
    code = (
        "import sys, json\nfrom shoal.cli.main import run_command\n"
        f"code = run_command({list(argv)!r})\n"
        "print(json.dumps([code, sorted(sys.modules)]), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, **env},
    )
    status, modules = json.loads(done.stderr.splitlines()[-1])
    assert status == 0, done.stderr
    return set(modules)


def test_the_version_is_printed_without_loading_the_command_tree(tmp_path: Path) -> None:
    loaded = imported("--version", env={"SHOAL_HOME": str(tmp_path)})
    assert not loaded & {"cyclopts", "socket", *HEAVY}


def test_listing_jobs_loads_nothing_heavy(tmp_path: Path, fake: FakeApiServer) -> None:
    fake.answers["GET", "/v1/jobs"] = {"items": [job_view()], "next_cursor": None}
    env = {"SHOAL_URL": fake.url, "SHOAL_TOKEN": TOKEN, "SHOAL_HOME": str(tmp_path)}
    for argv in (("queue", "--json"), ("queue", "--all", "--status", "failed")):
        loaded = imported(*argv, env=env)
        assert "shoal.client.http1" in loaded
        assert not loaded & set(HEAVY)
        assert not {
            name for name in loaded if name.startswith(("shoal.spec", "shoal.control", "shoal.cli.jobs.run"))
        }


def test_submitting_flags_loads_no_command_tree_and_no_spec(tmp_path: Path, fake: FakeApiServer) -> None:
    env = {"SHOAL_URL": fake.url, "SHOAL_TOKEN": TOKEN, "SHOAL_HOME": str(tmp_path)}
    loaded = imported("run", "-d", "--workdir", str(tmp_path), "--gpus", "2", "--", "true", env=env)
    assert "shoal.client.http1" in loaded
    assert not loaded & {"cyclopts", "dataclasses", "subprocess", "tarfile", *HEAVY}
    assert not {name for name in loaded if name.startswith(("shoal.spec", "shoal.settings"))}


def test_the_version_is_a_line(shell: Shell) -> None:
    assert shell("--version").out == shell("version").out == f"shoal {__version__}\n"


def test_help_is_a_command_too(shell: Shell) -> None:
    assert shell("help").out == shell("--help").out
    assert shell("help", "nodes", "drain").out == shell("nodes", "drain", "--help").out
    assert "Usage: shoal why" in shell("help", "why").out


def test_completion_offers_the_values_there_are(shell: Shell) -> None:
    script = shell("completion", "bash").out
    for values in ("queued starting running", "viewer member lead"):
        assert values in script or '" "'.join(values.split()) in script, values


def test_every_command_has_help_and_exists() -> None:
    app = build_app()
    for name in COMMANDS:
        assert app[name].help, name


@pytest.mark.parametrize(
    "argv", [("queu",), ("queue", "--no-such-flag"), ("logs",), ("queue", "--limit", "x")]
)
def test_a_mistyped_command_is_an_error_with_a_hint(shell: Shell, argv: tuple[str, ...]) -> None:
    result = shell(*argv)
    assert result.code == 2
    assert result.err.startswith("error: ")
    assert "hint: see `shoal" in result.err
    assert result.out == ""


@pytest.mark.parametrize(
    ("typed", "expected", "hint"),
    [
        ("cluster destory --yes", "unknown command `destory`; did you mean `destroy`?", "cluster"),
        ("nodes drian n1", "unknown command `drian`; did you mean `drain`?", "nodes"),
        ("connect slrum", "unknown command `slrum`; did you mean `slurm`?", "connect"),
        (
            "connect slurm --partiton main",
            "unknown option `--partiton`; did you mean `--partition`?",
            "connect slurm",
        ),
        ("nodes n1 --jsn", "unknown option `--jsn`; did you mean `--json`?", "nodes"),
    ],
)
def test_a_mistyped_part_of_a_command_is_named_and_the_help_that_has_it(
    shell: Shell, typed: str, expected: str, hint: str
) -> None:
    assert shell(*typed.split()).err == f"error: {expected}\nhint: see `shoal {hint} --help`\n"


@pytest.mark.parametrize(
    ("status", "code", "exit_code"),
    [(422, "spec.invalid", 2), (409, "state.conflict", 3), (429, "limit.reached", 3),
     (401, "unauthenticated", 4), (403, "denied", 4), (404, "not_found", 4), (502, "engine.refused", 5),
     (500, "bug", 70)],
)  # fmt: skip
def test_exit_codes_say_who_must_act(
    shell: Shell, fake: FakeApiServer, status: int, code: str, exit_code: int
) -> None:
    fake.answers["GET", "/v1/nodes"] = fake.problem(status, code, "no", hint="`type this`")
    result = shell("nodes", "--json")
    assert result.code == exit_code
    hint = "SHOAL_TOKEN is set" if status == 401 else "`type this`\n"
    assert f"error: no\nhint: {hint}" in result.err
    assert result.out == ""


def test_no_server_exits_6_and_says_what_to_type(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_URL")
    result = shell("queue")
    assert result.code == 6
    assert "shoal up" in result.err


def test_an_interrupted_command_exits_130(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(queue_command, "connect", interrupt)
    assert shell("queue").code == 130


def test_a_bug_is_a_sentence_and_the_traceback_goes_to_a_file(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_() -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(queue_command, "connect", break_)
    result = shell("queue")
    assert result.code == 70
    assert "Traceback" not in result.err
    assert "planted" in (shell.home / "logs" / "cli-error.txt").read_text()


def test_an_error_message_cannot_act_on_the_terminal(shell: Shell, fake: FakeApiServer) -> None:
    fake.answers["GET", "/v1/nodes"] = fake.problem(
        409, "state.conflict", "a\x1b]0;t\x07b\nc", hint="\x1b[31mx"
    )
    assert shell("nodes").err == "error: ab c\nhint: x\n"


def test_two_dashes_belong_to_run(shell: Shell) -> None:
    result = shell("queue", "--", "ls")
    assert result.code == 2
    assert "belongs to `shoal run`" in result.err


@pytest.mark.parametrize("shell_name", ["bash", "zsh", "fish"])
def test_completion_scripts_name_every_command(shell: Shell, shell_name: str) -> None:
    result = shell("completion", shell_name)
    assert result.code == 0
    assert all(name in result.out for name in COMMANDS)


def test_bash_still_completes_files(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").touch()
    script = shell("completion", "bash").out
    assert "complete -o bashdefault -o default -F _shoal shoal" in script
    ask = "COMP_WORDS=(shoal run jo); COMP_CWORD=2; _shoal shoal jo run; echo ${COMPREPLY[@]}"
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{ask}"],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=30,
    )
    assert done.stdout == "job.yaml\n"


def test_closed_pipe_ends_without_a_message(fake: FakeApiServer, tmp_path: Path) -> None:
    fake.answers["GET", "/v1/jobs"] = {
        "items": [job_view(number=n) for n in range(2000)],
        "next_cursor": None,
    }
    env = {**os.environ, "SHOAL_URL": fake.url, "SHOAL_TOKEN": TOKEN, "SHOAL_HOME": str(tmp_path)}
    script = f"{sys.executable} -m shoal.cli.main queue --json --limit 2000 | head -n 1"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env=env, timeout=60, check=False
    )
    assert done.stdout == "[\n"
    assert done.stderr == ""


def test_program_without_dashes_gets_a_hint_with_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "python", "-c", "print(1)"]) == 2
    assert "shoal run -- python -c 'print(1)'" in capsys.readouterr().err
    assert run_command(["run", "python", "train.py"]) == 2
    errors = capsys.readouterr().err
    assert "a program comes after `--`" in errors
    assert "shoal run -- python train.py" in errors
