"""Row 31: whatever a name, a value or a log line says, it is data and never a command or another's words."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from shoal.errors import SpecError
from shoal.runtime.files import spool
from shoal.spec import parse_job
from shoal.wire import EndKind, LogRule, Mount, RuleAction, TaskCredentials
from tests.support.runtime.confinement_modes import CGROUP, JOB_UID, needs
from tests.support.runtime.tasks import StartTask, a_task_spec

FULL = (CGROUP, "bubblewrap", "uid")
LINE = re.compile(rb"[0-9]{10}\.[0-9]{6} (?:-|[0-9]+) [oes] ")

COMMANDS = {
    "a substitution": "$(touch {canary})",
    "backticks": "`touch {canary}`",
    "a second command": "; touch {canary} ;",
    "a pipe": "| touch {canary}",
    "a new line": "x\ntouch {canary}\n",
    "quotes": "'\"; touch {canary} #",
    "a leading dash": "-oProxyCommand=touch {canary}",
    "two dashes": "--dev-bind / / {canary}",
    "a variable": "${{IFS}}touch${{IFS}}{canary}",
    "a wildcard": "/*",
}


@needs(*FULL)
@pytest.mark.parametrize("kind", COMMANDS)
def test_text_that_looks_like_a_command_stays_text(start: StartTask, open_place: Path, kind: str) -> None:
    canary = open_place / "canary"
    text = COMMANDS[kind].format(canary=canary)
    task_spec = a_task_spec(
        run='for v in "$SLURM_JOB_NAME" "$SHOAL_PROJECT" "$VALUE" "$SECRET"; do printf "%s\\0" "$v"; done',
        job_name=text,
        project=text,
        env={"VALUE": text, text.replace("=", "").replace("\0", ""): "name"},
        confinement=FULL,
        uid=JOB_UID,
    )
    task = start(task_spec, TaskCredentials(secrets={"SECRET": text}))
    assert task.run().kind is EndKind.SUCCEEDED, task.describe()
    assert "\n".join(task.texts()).rstrip("\0").split("\0") == [text] * 4
    assert not canary.exists()


@needs(*FULL)
@pytest.mark.parametrize("kind", [kind for kind in COMMANDS if kind != "a wildcard"])
def test_a_directory_with_such_a_name_is_mounted_as_it_is(
    start: StartTask, open_place: Path, kind: str
) -> None:
    canary = open_place / "canary"
    name = COMMANDS[kind].format(canary="canary").replace("/", "_")
    source = open_place / name
    source.mkdir()
    (source / "f").write_text("data\n")
    target = f"/{name}"
    mounts = (Mount(source=str(source), target=target, is_read_only=True),)
    run = f"cat {shlex.quote(target)}/f; touch {shlex.quote(target)}/new"
    task = start(a_task_spec(run=run, mounts=mounts, confinement=FULL, uid=JOB_UID))
    outcome = task.run()
    assert task.texts() == ["data"], task.describe()
    assert "Read-only" in outcome.message
    assert not canary.exists()


@pytest.mark.parametrize("field", ["name", "project", "queue"])
@pytest.mark.parametrize("text", ["$(id)", "a;b", "a\nb", "-rf", "a b", "../x", "a/b", "\u202ea", "a\0b", ""])
def test_names_that_could_mean_something_else_are_refused_at_once(field: str, text: str) -> None:
    with pytest.raises(SpecError):
        parse_job({"run": "true", field: text})


@pytest.mark.parametrize(
    "spec",
    [
        {"env": {"A=B": "x"}},
        {"env": {"A B": "x"}},
        {"env": {"-A": "x"}},
        {"env": {"A": "x\0y"}},
        {"secrets": ["$(id)"]},
        {"mounts": ["relative:/data"]},
        {"mounts": ["/srv/../etc:/data"]},
        {"mounts": ["/srv:/data/../etc"]},
        {"mounts": ["/srv:/proc"]},
        {"mounts": ["/srv\0:/data"]},
        {"array": "0..9; rm -rf /"},
        {"array": "$(id)"},
        {"checkpoint": "../../etc"},
        {"checkpoint": "/proc/x"},
        {"topology": "rack;id"},
        {"after": "1;id"},
    ],
    ids=str,
)
def test_a_spec_that_could_mean_something_else_is_refused_at_once(spec: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        parse_job({"run": "true", **spec})


def test_no_line_of_a_rank_can_pass_for_another_ranks_or_shoals(start: StartTask) -> None:
    forged = "1700000000.000000 7 o from rank 7"
    message = "1700000000.000000 - e shoal: all is well"
    program = (
        f"import sys; sys.stdout.write('\\r{forged}\\n{message}\\n\\x00\\x85\\u2028{forged}\\n{forged}')"
    )
    task = start(a_task_spec(run=f'python -c "{program}"; printf "\\r%s" "{message}" >&2', confinement=()))
    assert task.run().kind is EndKind.SUCCEEDED
    lines = Path(task.task.log).read_bytes().split(b"\n")[:-1]
    assert len(lines) == 5
    for line in lines:
        prefix = LINE.match(line)
        assert prefix is not None
        assert prefix[0].split()[1] == b"0"
        assert not line.startswith(b"1700000000")


@pytest.mark.parametrize(
    "match", ["(a+)+$b|\n1700000000.000000 3 o forged", "(\n1700000000.000000 3 o forged"]
)
def test_a_pattern_that_shoal_complains_about_cannot_forge_a_line(start: StartTask, match: str) -> None:
    rules = (LogRule(match=match, action=RuleAction.STOP_RETRIES),)
    run = "python -c 'print(\"a\" * 40)'; sleep 0.1; echo end"
    task = start(a_task_spec(run=run, log_rules=rules, confinement=()))
    outcome = task.run()
    assert (outcome.kind, outcome.rules_hit) == (EndKind.SUCCEEDED, ())
    assert [rank for rank, _, _ in task.log()].count("-") == 1
    assert not [text for text in task.texts() if "forged" in text]


def test_last_words_that_look_like_an_outcome_change_nothing_but_the_message(start: StartTask) -> None:
    message = '{"kind":"succeeded","exit_code":0,"rules_hit":["exclude_node"]}'
    task = start(
        a_task_spec(run=f"echo '{message}' >&2; printf 'x%.0s' $(seq 9000) >&2; exit 9", confinement=())
    )
    outcome = task.run()
    assert (outcome.kind, outcome.exit_code, outcome.rules_hit) == (EndKind.EXITED, 9, ())
    assert outcome.message.startswith("rank 0 exited with code 9\n")
    assert len(outcome.message) <= 2000


def test_a_rank_cannot_pass_its_failure_off_as_one_of_the_set_up(start: StartTask) -> None:
    """125 is what our own child says when it could not start a program."""
    task = start(a_task_spec(run="echo 'SpecError: disk full' >&2; exit 125", confinement=()))
    outcome = task.run()
    assert (outcome.kind, outcome.exit_code) == (EndKind.EXITED, 125)
    assert outcome.started_at is not None


@needs(*FULL)
def test_files_with_the_names_of_shoals_own_mean_nothing_in_the_work_directory(start: StartTask) -> None:
    names = "stop outcome.json claimed lock started cgroups task_spec.json"
    run = f"for f in {names}; do echo '{{}}' > $f; done; exit 4"
    task = start(a_task_spec(run=run, confinement=FULL, uid=JOB_UID, cpus=1.0))
    outcome = task.run()
    assert (outcome.kind, outcome.exit_code) == (EndKind.EXITED, 4)
    assert spool.read_stop(task.task) is None
