"""The stand-ins for `srun` and `scontrol`: in a rank, `srun prog args` becomes `prog args`.

In a batch file `srun` starts a program on all nodes. In a Shoal job the file itself runs in every rank, so
the other tasks already exist.
"""

from __future__ import annotations

import os
import sys

from . import launcher_lock, launchers, rank_identity

NAMES = ("srun", "scontrol")
COUNT = ("-n", "--ntasks")
NODES = ("-N", "--nodes")
PER_NODE = ("--ntasks-per-node",)
FLAGS = {
    *(
        "async",
        "consolidate-segments",
        "contiguous",
        "debugger-test",
        "disable-status",
        "exact",
        "help",
        "hold",
    ),
    *("interactive", "label", "multi-prog", "no-allocate", "overcommit", "oversubscribe", "parsable"),
    *(
        "preserve-env",
        "pty",
        "quiet",
        "quit-on-interrupt",
        "reboot",
        "share",
        "spread-job",
        "spread-segments",
    ),
    *("stepmgr", "test-only", "unbuffered", "usage", "use-min-nodes", "verbose", "version"),
    *("wait-for-children", "whole"),
    # These may have a value, but only behind `=`.
    *("bcast", "compress", "exclusive", "external-launcher", "immediate", "kill-on-bad-exit", "nice"),
    *("no-kill", "oom-kill-step", "overlap", "propagate", "resv-ports", "send-libs", "x11"),
}
"""Long options of `srun` without a separate value, from Slurm 22.05 to 26.05. All others take the next
word."""
SHORT_FLAGS = "EHOQVXZhlsuv"
SHORT_OPTIONAL = "IKk"
"""Short options whose optional value is part of the same word."""
LISTS = ("--mpi", "--cpu-bind", "--mem-bind", "--gpu-bind", "--gres")
"""Options that print their values for the value `list` or `help`. Then `srun` starts nothing."""


class SrunOptions:
    """The options of an `srun` command that matter here."""

    def __init__(self) -> None:
        self.tasks: str | None = None
        self.nodes: str | None = None
        self.per_node: str | None = None
        self.overlaps = False
        self.query: list[str] = []
        """The option with which `srun` describes itself and starts nothing."""
        self.variables: dict[str, str] = {}
        self.program: list[str] = []


def read(arguments: list[str]) -> SrunOptions:
    """Parse an `srun` command. The program is the first word that belongs to no option."""
    options, at = SrunOptions(), 0
    while at < len(arguments) and len(arguments[at]) > 1 and arguments[at].startswith("-"):
        word = arguments[at]
        at += 1
        if word == "--":
            break
        name, value = _long(word) if word.startswith("--") else _short(word)
        if value is None and at < len(arguments):
            value, at = arguments[at], at + 1
        _note(options, name, value or "")
    options.program = arguments[at:]
    return options


def _long(word: str) -> tuple[str, str | None]:
    """Return the option and its value. None: the value is the next word."""
    name, has_value, value = word.partition("=")
    return name, value if has_value or name[2:] in FLAGS else None


def _short(word: str) -> tuple[str, str | None]:
    """Return the last option of a group such as `-lun4`, and its value. None: the value is the next word."""
    for place, letter in enumerate(word[1:], start=2):
        if letter in SHORT_OPTIONAL:
            break
        if letter not in SHORT_FLAGS:
            return f"-{letter}", word[place:].lstrip("=") or None
    return word, ""


def _note(options: SrunOptions, name: str, value: str) -> None:
    if name in COUNT:
        options.tasks = value
    elif name in NODES:
        options.nodes = value
    elif name in PER_NODE:
        options.per_node = value
    elif name in launchers.QUERIES:
        options.query = [name]
    elif name in LISTS and value in ("list", "help"):
        options.query = [f"{name}={value}"]
    elif name == "--overlap":
        options.overlaps = True
    elif name == "--export":
        pairs = (word.partition("=") for word in value.split(",") if "=" in word)
        options.variables.update({variable: text for variable, _, text in pairs})


def become(folder: str, name: str, arguments: list[str], real: str | None) -> None:
    """Become the program as this rank; list nodes for `scontrol show hostnames`. Never returns."""
    if name == "scontrol":
        _run_scontrol(arguments, real)
    options = read(arguments)
    if options.query:
        _run_real(name, options.query, real, "")
    try:
        rank_identity.require(name, dict(os.environ))
        problem = problem_of(options)
        if problem:
            raise launchers.LauncherRefused(f"`srun` {problem[0]}", problem[1])
    except launchers.LauncherRefused as refused:
        launchers.exit_refused(refused)
    os.environ.update(rank_identity.launcher_variables(name, dict(os.environ)))
    if not _is_helper(options):
        launcher_lock.hold_step(folder, dict(os.environ))
    os.environ.update(options.variables)
    try:
        os.execvp(options.program[0], options.program)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"shoal: `srun` cannot start `{options.program[0]}`: {error.strerror}\n")
        os._exit(127)


def _is_helper(options: SrunOptions) -> bool:
    """Whether the step is not the job's own work: one task of a larger job, or a monitor beside the others.

    Slurm ends such a step with the job, and the job succeeds all the same.
    """
    return options.overlaps or (options.tasks == "1" and os.environ.get("SHOAL_WORLD_SIZE", "1") != "1")


def problem_of(options: SrunOptions) -> tuple[str, str] | None:
    environment = os.environ
    if not options.program:
        return "has no program behind its options", "write the program alone in `run`; Shoal starts the ranks"
    if options.tasks == "1":
        return None  # people use a step of one task to ask a node for its address, so it runs here
    nodes = environment.get("SHOAL_NUM_NODES", "1")
    for wanted, there, what, field, parts in (
        (options.nodes, nodes, "nodes", "nodes", 1),
        (
            options.per_node,
            environment.get("SHOAL_RANKS_PER_NODE", "1"),
            "tasks on a node",
            "ranks_per_node",
            1,
        ),
        (options.tasks, environment.get("SHOAL_WORLD_SIZE", "1"), "tasks", "ranks_per_node", int(nodes)),
    ):
        if wanted is not None and wanted.isdigit() and wanted != there:
            hint = f"set `{field}: {-(-int(wanted) // parts)}` in the job, or leave the option out"
            return f"asks for {wanted} {what}, and the job has {there}", hint
    return None


def _run_scontrol(arguments: list[str], real: str | None) -> None:
    positional = [word for word in arguments if not word.startswith("-")]
    if positional[:2] in (["show", "hostnames"], ["show", "hostname"]):
        names = positional[2] if len(positional) > 2 else os.environ.get("SLURM_JOB_NODELIST", "")
        if "[" not in names:  # Shoal writes lists in full, so a list with brackets is for the real scontrol
            os.write(1, "".join(f"{node}\n" for node in names.split(",")).encode())
            os._exit(0)
    _run_real("scontrol", arguments, real, "; of `scontrol` only `show hostnames` works in a job")


def _run_real(name: str, arguments: list[str], real: str | None, remark: str) -> None:
    """Become the real program. Never returns."""
    if real is not None:
        os.execv(real, [real, *arguments])  # noqa: S606
    sys.stderr.write(f"shoal: there is no Slurm here, and so no `{name}`{remark}\n")
    os._exit(127)
