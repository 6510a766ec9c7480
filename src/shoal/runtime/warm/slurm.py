"""`srun prog args`, in a rank: become `prog args`. The supervisor has started the other tasks.

In a batch file `srun` starts a program on all nodes; in a job of Shoal's the file itself runs as every rank.
"""

from __future__ import annotations

import os
import sys

from . import launchers

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
"""Long options of `srun` that do not take the next word, from Slurm 22.05 to 26.05; all others do."""
SHORT_FLAGS = "EHOQVXZhlsuv"
SHORT_OPTIONAL = "IKk"
"""Short options whose value, if they have one, stands in the same word."""


class Asked:
    """What a command line comes down to."""

    def __init__(self) -> None:
        self.tasks: str | None = None
        self.nodes: str | None = None
        self.per_node: str | None = None
        self.variables: dict[str, str] = {}
        self.program: list[str] = []


def read(arguments: list[str]) -> Asked:
    """Take an `srun` command apart. The program is the first word that belongs to no option."""
    asked, at = Asked(), 0
    while at < len(arguments) and len(arguments[at]) > 1 and arguments[at].startswith("-"):
        word = arguments[at]
        at += 1
        if word == "--":
            break
        name, value = _long(word) if word.startswith("--") else _short(word)
        if value is None and at < len(arguments):
            value, at = arguments[at], at + 1
        _note(asked, name, value or "")
    asked.program = arguments[at:]
    return asked


def _long(word: str) -> tuple[str, str | None]:
    """The option and its value; None: the value is the next word."""
    name, has_value, value = word.partition("=")
    return name, value if has_value or name[2:] in FLAGS else None


def _short(word: str) -> tuple[str, str | None]:
    """The last option of a group as `-lun4`, and its value; None: the value is the next word."""
    for place, letter in enumerate(word[1:], start=2):
        if letter in SHORT_OPTIONAL:
            break
        if letter not in SHORT_FLAGS:
            return f"-{letter}", word[place:].lstrip("=") or None
    return word, ""


def _note(asked: Asked, name: str, value: str) -> None:
    if name in COUNT:
        asked.tasks = value
    elif name in NODES:
        asked.nodes = value
    elif name in PER_NODE:
        asked.per_node = value
    elif name == "--export":
        pairs = (word.partition("=") for word in value.split(",") if "=" in word)
        asked.variables.update({variable: told for variable, _, told in pairs})


def become(name: str, arguments: list[str], real: str | None) -> None:
    """Become the program as this rank; list nodes for `scontrol show hostnames`. Never returns."""
    if name == "scontrol":
        _control(arguments, real)
    asked = read(arguments)
    problem = problem_of(asked)
    if problem:
        launchers.end(launchers.Refused(f"`srun` {problem[0]}", problem[1]))
    os.environ.update(asked.variables)
    try:
        os.execvp(asked.program[0], asked.program)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"shoal: `srun` cannot start `{asked.program[0]}`: {error.strerror}\n")
        os._exit(127)


def problem_of(asked: Asked) -> tuple[str, str] | None:
    told = os.environ
    if not asked.program:
        return "has no program behind its options", "write the program alone in `run`; Shoal starts the ranks"
    if asked.tasks == "1":
        return None  # a step of one task, as people write it to ask a node for its address: it runs here
    nodes = told.get("SHOAL_NUM_NODES", "1")
    for wanted, there, what, field, parts in (
        (asked.nodes, nodes, "nodes", "nodes", 1),
        (asked.per_node, told.get("SHOAL_RANKS_PER_NODE", "1"), "tasks on a node", "ranks_per_node", 1),
        (asked.tasks, told.get("SHOAL_WORLD_SIZE", "1"), "tasks", "ranks_per_node", int(nodes)),
    ):
        if wanted is not None and wanted.isdigit() and wanted != there:
            hint = f"set `{field}: {-(-int(wanted) // parts)}` in the job, or leave the option out"
            return f"asks for {wanted} {what}, and the job has {there}", hint
    return None


def _control(arguments: list[str], real: str | None) -> None:
    words = [word for word in arguments if not word.startswith("-")]
    if words[:2] in (["show", "hostnames"], ["show", "hostname"]):
        names = words[2] if len(words) > 2 else os.environ.get("SLURM_JOB_NODELIST", "")
        if "[" not in names:  # Shoal's lists are written out; another one is Slurm's to read
            os.write(1, "".join(f"{node}\n" for node in names.split(",")).encode())
            os._exit(0)
    if real is not None:
        os.execv(real, [real, *arguments])  # noqa: S606
    sys.stderr.write("shoal: there is no Slurm here; of `scontrol` only `show hostnames` works in a job\n")
    os._exit(127)
