"""The entry point: finds the command, runs it, and turns what went wrong into words and an exit code.

Exit codes: 0 done · 1 `doctor` found something broken · 2 wrong request · 3 wrong moment · 4 not allowed ·
5 refused by the engine · 6 unreachable · 70 a bug of ours · 130 interrupted. `run` returns the job's own.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from shoal import __version__
from shoal.cli.quick import name_stdin, read_run

COMMANDS = {
    "up": ("up:up", "Start the control plane of this machine in the background."),
    "down": ("up:down", "Stop the control plane; running jobs run on."),
    "connect": ("connect:app", "Say where work runs: on a Slurm cluster, a Ray, or this machine."),
    "status": ("status:status", "The cluster on one screen."),
    "run": ("run:run", "Submit a job and follow it; returns the job's exit code."),
    "serve": ("services:serve", "Run a service, or a new release of it."),
    "services": ("services:services", "List services, or show one with its replicas."),
    "rollout": ("services:rollout", "Show a service's rollout; undo or promote it."),
    "scale": ("services:scale", "Say how many replicas a service may have."),
    "queue": ("queue:queue", "List jobs."),
    "logs": ("logs:logs", "Print or follow a job's output."),
    "metrics": ("metrics:metrics", "Show what a job and its nodes measure, as curves."),
    "checkpoints": ("checkpoints:checkpoints", "List what a job has saved, and how often it saves."),
    "why": ("why:why", "Say why a job is not running, or how it ended."),
    "stop": ("jobs:stop", "Stop jobs and services."),
    "retry": ("jobs:retry", "Try ended jobs again."),
    "nodes": ("nodes:app", "List nodes; cordon, drain, resume, remove or declare them dead."),
    "drain": ("nodes:drain", "Take a node out of work: its jobs are queued again."),
    "resume": ("nodes:resume", "Give a cordoned, drained or dead node work again."),
    "cluster": ("cluster:app", "Make a Slurm cluster out of machines that SSH reaches, and keep it."),
    "reserve": ("reserve:reserve", "Keep nodes for a project or for maintenance, for a while."),
    "reservations": ("reserve:app", "List reservations and maintenance windows; cancel one."),
    "drill": ("drill:app", "Break something of a live job on purpose, and measure how it goes on."),
    "events": ("events:events", "What happened, in order."),
    "explain-decision": ("decision:explain_decision", "Make a recorded decision of the scheduler again."),
    "audit": ("events:audit", "Who changed what; `--verify` checks the chain."),
    "whatif": (
        "whatif:whatif",
        "Simulate the past, or a trace, with other nodes, quotas or policy.",
    ),
    "plan": ("plan:plan", "Find the smallest cluster that meets a target, and what it costs."),
    "login": ("login:login", "Remember a server and a token."),
    "project": ("project:app", "Projects, their quotas and members."),
    "user": ("user:app", "Users and their roles."),
    "token": ("token:app", "Tokens: create, list, revoke."),
    "backup": ("backup:backup", "Write this home to one file while it runs; `--verify` checks one."),
    "restore": ("backup:restore", "Unpack a backup to a new home."),
    "doctor": ("doctor:doctor", "Find what is wrong with this machine and say what to type."),
    "completion": ("completion:completion", "Print a completion script for bash, zsh or fish."),
}
USAGE = {"run": "Usage: shoal run [FILE] [OPTIONS] [-- COMMAND [ARGS]]"}


def build_app(called: str | None = None) -> Any:
    """The command tree. Commands are named here and imported only when called.

    The one that is `called` explains itself; the others are listed with their line above.
    """
    from cyclopts import App, Parameter

    app = App(
        name="shoal",
        help="Many machines, one AI cluster. Start with `shoal up`, then `shoal run -- python train.py`.",
        default_parameter=Parameter(show_default=False),
        version=__version__,
        version_flags=["--version"],
        help_format="plaintext",
        result_action="return_value",
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
    )
    for rank, (name, (place, summary)) in enumerate(COMMANDS.items()):
        told = None if name == called else summary
        more = {"usage": USAGE[name]} if name in USAGE else {}
        app.command(f"shoal.cli.{place}", name=name, help=told, sort_key=rank, **more)
    app.command("shoal.cli.completion:install", name="--install-completion", help="Install shell completion.")
    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    os.umask(0o077)  # what it writes are tokens, keys and logs; whatever others may read says so itself
    code = run_command(list(sys.argv[1:] if argv is None else argv))
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = _quiet_pipe()
    sys.exit(code)


def run_command(argv: list[str]) -> int:
    """The exit code of `shoal ARGV`. Prints errors; raises nothing but `SystemExit`."""
    if argv in (["--version"], ["version"]):
        print(f"shoal {__version__}")
        return 0
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    from shoal.errors import ShoalError

    try:
        return _dispatch(argv)
    except ShoalError as error:
        from shoal.cli.show import print_error

        print_error(error, argv)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return _quiet_pipe()
    except Exception as error:  # noqa: BLE001 - a person gets a sentence, never a traceback
        return _explain_bug(error, argv)


def _dispatch(argv: list[str]) -> int:
    """Parse and call. What follows `--` is a program and never parsed."""
    if (typed := read_run(argv)) is not None:
        from shoal.cli.submit import submit_flags

        return submit_flags(
            typed.flags, typed.program, detach=typed.should_detach, json=typed.should_print_json
        )
    head, tail = argv, []
    if "--" in argv:
        head, tail = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    head = name_stdin(head)
    from cyclopts import CycloptsError

    from shoal.errors import SpecError

    try:
        app = build_app(head[0] if head else None)
        command, bound, extra = app.parse_args(head or ["--help"], exit_on_error=False, print_error=False)
    except CycloptsError as error:
        known = head[0] if head and head[0] in COMMANDS else None
        from shoal.cli.parse_words import misspelt, plain

        parts = [part for part in app[known] if not part.startswith("-")] if known else []
        if head[1:2] and head[1] in parts:
            known = f"{known} {head[1]}"
        told = misspelt(head, parts) or plain(" ".join(str(error).split()), head, known or "")
        if known == "run" and not tail and len(head) > 1 and not head[1].startswith("-"):
            program = shlex.join(head[1:])
            raise SpecError("a program comes after `--`", hint=f"shoal run -- {program}") from error
        hint = f"see `shoal {known} --help`" if known else "see `shoal --help`"
        raise SpecError(
            told, hint=f"{hint}; `shoal queue` lists jobs" if told.endswith("` needs JOB") else hint
        ) from error
    if "program" in extra:
        bound.arguments["program"] = tuple(tail)
    elif tail:
        raise SpecError("`--` belongs to `shoal run`", hint="`shoal run -- python train.py`")
    return int(command(*bound.args, **bound.kwargs) or 0)


def _quiet_pipe() -> int:
    """Whoever read us is gone (`shoal logs | head`): leave without a word."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


def _explain_bug(error: Exception, argv: list[str]) -> int:
    import traceback

    from shoal.cli.show import note
    from shoal.client.credentials import write_private
    from shoal.home import home_from_env

    note(f"error: unexpected {type(error).__name__}: {error}")
    report = home_from_env() / "logs" / "cli-error.txt"
    try:
        write_private(report, f"shoal {argv[:1]} {__version__}\n{''.join(traceback.format_exception(error))}")
        note(f"hint: this is a bug in Shoal; the details are in {report}")
    except OSError:
        note("hint: this is a bug in Shoal; see it with `python -X dev -m shoal.cli.main`")
    return 70


if __name__ == "__main__":
    main()
