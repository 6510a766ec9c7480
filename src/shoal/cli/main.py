"""The entry point: find the command, run it, and turn an error into sentences and an exit code.

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
from shoal.cli.arguments import name_stdin, read_run

COMMANDS = {
    "up": ("control_plane.up:up", "Start the control plane of this machine in the background."),
    "down": ("control_plane.up:down", "Stop the control plane; running jobs keep running."),
    "connect": (
        "connect.commands:app",
        "Choose where jobs run: a Slurm cluster, a Ray cluster or this machine.",
    ),
    "status": ("control_plane.status:status", "Show the cluster on one screen."),
    "run": ("jobs.run:run", "Submit a job and follow it; returns the job's exit code."),
    "serve": ("services:serve", "Run a service, or a new release of it."),
    "services": ("services:services", "List services, or show one with its replicas."),
    "rollout": ("services:rollout", "Show a service's rollout; undo or promote it."),
    "scale": ("services:scale", "Set how many replicas a service may have."),
    "queue": ("jobs.queue:queue", "List jobs."),
    "logs": ("jobs.logs:logs", "Print or follow a job's output."),
    "metrics": ("jobs.metrics:metrics", "Show what a job and its nodes measure, as curves."),
    "checkpoints": ("jobs.checkpoints:checkpoints", "List what a job has saved, and how often it saves."),
    "why": ("jobs.why:why", "Explain why a job is not running, or how it ended."),
    "stop": ("jobs.stop_and_retry:stop", "Stop jobs and services."),
    "retry": ("jobs.stop_and_retry:retry", "Retry jobs that have ended."),
    "nodes": ("nodes:app", "List nodes; cordon, drain, resume, remove or declare them dead."),
    "drain": ("nodes:drain", "Drain a node: its jobs stop and are queued again."),
    "resume": ("nodes:resume", "Let a cordoned, drained or dead node take work again."),
    "cluster": (
        "cluster.commands:app",
        "Create and maintain a Slurm cluster on machines reachable by SSH.",
    ),
    "reserve": ("reserve:reserve", "Reserve nodes for a project or for maintenance, for a limited time."),
    "reservations": ("reserve:app", "List reservations and maintenance windows; cancel one."),
    "drill": ("drill:app", "Inject a fault into a running job and measure how the job recovers."),
    "events": ("events:events", "List what happened, in order."),
    "explain-decision": (
        "plan.decision:explain_decision",
        "Replay a recorded decision of the scheduler.",
    ),
    "audit": ("events:audit", "List who changed what; `--verify` checks the hash chain."),
    "whatif": (
        "plan.whatif:whatif",
        "Simulate the past, or a trace, with other nodes, quotas or policy.",
    ),
    "plan": ("plan.plan:plan", "Find the smallest cluster that meets a target, and what it costs."),
    "login": ("login:login", "Save a server address and a token."),
    "project": ("project:app", "Manage projects, their quotas and members."),
    "user": ("user:app", "Manage users and their roles."),
    "token": ("token:app", "Tokens: create, list, revoke."),
    "backup": (
        "backup.commands:backup",
        "Back up this home to one file while it runs; `--verify` checks a backup.",
    ),
    "restore": ("backup.commands:restore", "Unpack a backup to a new home."),
    "doctor": ("checkup.doctor:doctor", "Find problems on this machine and print how to fix each."),
    "completion": ("completion:completion", "Print a completion script for bash, zsh or fish."),
}
USAGE = {"run": "Usage: shoal run [FILE] [OPTIONS] [-- COMMAND [ARGS]]"}


def build_app(called: str | None = None) -> Any:
    """Build the command tree. It names all commands here and imports a command only when it is called.

    The command named by `called` takes its help from its own function, the others from `COMMANDS`.
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
        help_text = None if name == called else summary
        more = {"usage": USAGE[name]} if name in USAGE else {}
        app.command(f"shoal.cli.{place}", name=name, help=help_text, sort_key=rank, **more)
    app.command("shoal.cli.completion:install", name="--install-completion", help="Install shell completion.")
    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    os.umask(0o077)  # it writes tokens, keys and logs; code that writes files for others sets their mode
    code = run_command(list(sys.argv[1:] if argv is None else argv))
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = _quiet_pipe()
    sys.exit(code)


def run_command(argv: list[str]) -> int:
    """Run `shoal ARGV` and return its exit code. Print errors; raise nothing but `SystemExit`."""
    if argv in (["--version"], ["version"]):
        print(f"shoal {__version__}")
        return 0
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    from shoal.errors import ShoalError

    try:
        return _dispatch(argv)
    except ShoalError as error:
        from shoal.cli.output import print_error

        print_error(error, argv)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return _quiet_pipe()
    except Exception as error:  # noqa: BLE001 - a user gets a sentence, never a traceback
        return _explain_bug(error, argv)


def _dispatch(argv: list[str]) -> int:
    """Parse and call. Everything after `--` is a program and is never parsed."""
    if (typed := read_run(argv)) is not None:
        from shoal.cli.jobs.submit import submit_flags

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
        command_name = head[0] if head and head[0] in COMMANDS else None
        from shoal.cli.arguments import misspelt_subcommand, plain_message

        parts = [part for part in app[command_name] if not part.startswith("-")] if command_name else []
        if head[1:2] and head[1] in parts:
            command_name = f"{command_name} {head[1]}"
        problem = misspelt_subcommand(head, parts) or plain_message(
            " ".join(str(error).split()), head, command_name or ""
        )
        if command_name == "run" and not tail and len(head) > 1 and not head[1].startswith("-"):
            program = shlex.join(head[1:])
            raise SpecError("a program comes after `--`", hint=f"shoal run -- {program}") from error
        hint = f"see `shoal {command_name} --help`" if command_name else "see `shoal --help`"
        raise SpecError(
            problem, hint=f"{hint}; `shoal queue` lists jobs" if problem.endswith("` needs JOB") else hint
        ) from error
    if "program" in extra:
        bound.arguments["program"] = tuple(tail)
    elif tail:
        raise SpecError("`--` belongs to `shoal run`", hint="`shoal run -- python train.py`")
    return int(command(*bound.args, **bound.kwargs) or 0)


def _quiet_pipe() -> int:
    """The reader of our output has exited (`shoal logs | head`): end without a message."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


def _explain_bug(error: Exception, argv: list[str]) -> int:
    import traceback

    from shoal.cli.output import note
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
