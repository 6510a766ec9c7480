"""How many processes and nodes the launchers in a job's `run` ask for, as far as their words tell.

Shoal starts the ranks in their place, so a job that says nothing else has as many. What stands in variables
or in a script that `run` starts is judged in the ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

LAUNCHERS = frozenset(
    {
        *("torchrun", "torch.distributed.run", "torch.distributed.launch"),
        *("deepspeed", "deepspeed.launcher.runner"),
        *("accelerate", "accelerate-launch", "accelerate.commands.launch"),
    }
)
PER_NODE = ("--nproc-per-node", "--num-gpus")
NODES = ("--nnodes", "--num-machines", "--num-nodes")
IN_ALL = ("--num-processes",)
MPI_LAUNCHERS = frozenset({"mpirun", "mpiexec", "orterun", "prterun"})
MPI_IN_ALL = ("-n", "-np", "--n", "--np")
T = TypeVar("T")
_COMMANDS = re.compile(r"[\n;&|]")
_COUNT = re.compile(r"[1-9][0-9]{0,5}\Z")


class Asked(BaseModel):
    """None: no launcher says it, or several say different things."""

    model_config = ConfigDict(frozen=True)

    per_node: int | None = None
    in_all: int | None = None
    nodes: tuple[int, int] | None = None
    """At least and at most: `--nnodes 2:4` is elastic."""
    mpi_in_all: int | None = None
    """From `mpirun -n`. On one node `mpirun` may start them all in a single rank."""

    def ranks_on(self, nodes: int) -> int | None:
        """How many processes there are on each of so many nodes."""
        if self.per_node is None and self.in_all is not None and self.in_all % nodes == 0:
            return self.in_all // nodes
        return self.per_node


def asked_in(run: str) -> Asked:
    """What the launchers in a script ask for. Takes time in proportion to the script's length."""
    commands = [command.split() for command in _COMMANDS.split(run.replace("\\\n", " "))]
    found = [_options(words) for words in commands]
    return Asked(
        per_node=_only(_count(options, PER_NODE) for options in found),
        in_all=_only(_count(options, IN_ALL) for options in found),
        nodes=_only(_span(options) for options in found),
        mpi_in_all=_only(_mpi_count(words) for words in commands),
    )


def _options(words: list[str]) -> dict[str, str]:
    """The options of a command's launcher; those behind its program are the program's own."""
    names = (word.strip("'\"").rpartition("/")[2] for word in words)
    at = next((position for position, name in enumerate(names) if name in LAUNCHERS), len(words))
    options: dict[str, str] = {}
    name = ""
    for quoted in words[at + 1 :]:
        word = quoted.strip("'\"")
        if word.endswith(".py") or word in ("-m", "--module") or word.startswith("#"):
            break
        if word.startswith("-"):
            name, _, value = word.partition("=")
            name = name.replace("_", "-")
            options[name] = value
        elif name and not options[name]:
            options[name] = word
    return {} if any(word.startswith("#") for word in words[:at]) else options


def _mpi_count(words: list[str]) -> int | None:
    """How many processes an `mpirun` asks for. No option with a value may stand before the number: a later
    `-n` may be the program's own.
    """
    at = next((n for n, word in enumerate(words) if word.partition(".")[0] in MPI_LAUNCHERS), len(words))
    if any(word.startswith("#") for word in words[:at]):
        return None
    for position, word in enumerate(words[at + 1 :], at + 1):
        name, _, value = word.partition("=")
        if name in MPI_IN_ALL:
            value = value or "".join(words[position + 1 : position + 2])
            return int(value) if _COUNT.match(value) else None
        if not word.startswith("-"):
            break
    return None


def _count(options: dict[str, str], names: tuple[str, ...]) -> int | None:
    told = next((options[name] for name in names if name in options), "")
    return int(told) if _COUNT.match(told) else None


def _span(options: dict[str, str]) -> tuple[int, int] | None:
    low, _, high = next((options[name] for name in NODES if name in options), "").partition(":")
    if _COUNT.match(low) and (not high or _COUNT.match(high)):
        return int(low), int(high or low)
    return None


def _only(found: Iterable[T | None]) -> T | None:
    """What all of those say that say something."""
    told = {one for one in found if one is not None}
    return told.pop() if len(told) == 1 else None
