"""`mpirun -n 4 prog args`, in a rank: become `prog args`. The supervisor has started the other ranks.

Where the job has one rank and the command wants several, the person means MPI's own processes: then the real
one runs, and sees nothing of our numbers.
"""

from __future__ import annotations

import os
import sys

NAMES = ("mpirun", "mpiexec")
COUNT = {"-n", "-np", "--n", "--np", "-c"}
PAIRS = {"--mca", "-mca", "--gmca", "-gmca", "--prtemca", "--pmixmca", "-genv", "-env"}
"""Options with two values."""
FLAGS = {
    *("--allow-run-as-root", "--oversubscribe", "-oversubscribe", "--nooversubscribe", "--tag-output"),
    *("--report-bindings", "-report-bindings", "--bind-to-core", "-bind-to-core", "--bind-to-none", "-l"),
    *("--bynode", "-bynode", "--byslot", "-byslot", "--display-map", "--display-allocation", "-q", "--quiet"),
    *("-v", "--verbose", "-verbose", "--pernode", "-pernode", "--do-not-launch", "--timestamp-output"),
    *("-genvall", "-envall", "-genvnone", "-envnone", "--enable-recovery", "--continuous", "-prepend-rank"),
}
"""Options without a value; all others have one."""
OURS = ("OMPI_", "PMI_", "PMIX_", "MPI_LOCAL", "SLURM")


class Asked:
    """What a command line comes down to."""

    def __init__(self) -> None:
        self.count: str | None = None
        self.variables: dict[str, str] = {}
        self.program: list[str] = []


def read(arguments: list[str]) -> Asked:
    """Take an `mpirun` command apart. The program is the first word that belongs to no option."""
    asked, at = Asked(), 0
    while at < len(arguments) and arguments[at].startswith("-"):
        word, has_value = arguments[at], "=" in arguments[at] and arguments[at].startswith("--")
        name = word.partition("=")[0] if has_value else word
        width = 1 if has_value or name in FLAGS else 3 if name in PAIRS else 2
        values = [word.partition("=")[2]] if has_value else arguments[at + 1 : at + width]
        _note(asked, name, values)
        at += width
    asked.program = arguments[at:]
    return asked


def _note(asked: Asked, name: str, values: list[str]) -> None:
    if name in COUNT and values:
        asked.count = values[0]
    elif name in ("-genv", "-env") and len(values) == 2:
        asked.variables[values[0]] = values[1]
    elif name == "-x" and values and "=" in values[0]:
        variable, _, value = values[0].partition("=")
        asked.variables[variable] = value


def become(name: str, arguments: list[str], real: str | None) -> None:
    """Become the program as this rank, or the real `mpirun`. Never returns."""
    asked = read(arguments)
    world = os.environ.get("WORLD_SIZE", "1")
    if asked.count not in (None, world) and world == "1" and real is not None:
        others = {n: value for n, value in os.environ.items() if not n.startswith(OURS)}
        os.execve(real, [real, *arguments], others)  # noqa: S606
    problem, hint = _problem(asked, world)
    if problem:
        sys.stderr.write(f"shoal: `{name}` {problem}\nhint: {hint}\n")
        os._exit(2)
    os.environ.update(asked.variables)
    try:
        os.execvp(asked.program[0], asked.program)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"shoal: `{name}` cannot start `{asked.program[0]}`: {error.strerror}\n")
        os._exit(127)


def _problem(asked: Asked, world: str) -> tuple[str, str]:
    if not asked.program:
        return "has no program behind its options", "write the program alone in `run`; Shoal starts the ranks"
    if ":" in asked.program:
        return "has several programs, with `:` between them", "submit one job for each of them"
    if asked.count not in (None, world):
        nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        each = -(-int(asked.count) // nodes) if asked.count and asked.count.isdigit() else asked.count
        return (
            f"asks for {asked.count} processes, and the job has {world}",
            f"set `ranks_per_node: {each}` in the job, or leave the option out",
        )
    return "", ""
