"""The numbers of processes and nodes that the launchers in a job's `run` ask for, if their options show them.

Shoal starts the ranks in their place, so a job without numbers of its own has as many. Launchers in
variables, or in a script that `run` starts, are judged in the ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

LAUNCHERS = frozenset(
    {
        *("torchrun", "torch.distributed.run", "torch.distributed.launch"),
        *("deepspeed", "deepspeed.launcher.runner", "deepspeed.pt", "ds"),
        *("accelerate-launch", "accelerate.commands.launch"),
    }
)
WITH_LAUNCH = frozenset({"accelerate", "accelerate_cli", "accelerate.commands.accelerate_cli"})
"""Launchers if the next word is `launch`."""
_FLAGS = """
--help --standalone --module -m --no-python --run-path --virtual-local-rank --use-env --no-local-rank --no-ssh
--no-ssh-check --force-multi --save-pid --bind-cores-to-rank --quiet -q --elastic-training --cpu --multi-gpu
--tpu --enable-cpu-affinity --dynamo-use-fullgraph --dynamo-use-dynamic --dynamo-use-regional-compilation
--use-deepspeed --use-fsdp --use-parallelism-config --use-megatron-lm --same-network --tpu-cluster
--no-tpu-cluster --tpu-use-sudo --downcast-bf16 --fp8-use-autocast-during-eval --debug
"""
FLAGS = frozenset(_FLAGS.split())
"""Options of launchers without a value. The word behind any other option may be its value."""
SHORTEST = {
    "--nnodes": "--nn",
    "--nproc-per-node": "--np",
    "--num-nodes": "--num-n",
    "--num-gpus": "--num-g",
    "--num-accelerators": "--num-a",
}
"""The shortest abbreviations of their options that torchrun and deepspeed accept."""
PER_NODE = ("--nproc-per-node", "--num-gpus", "--num-accelerators")
NODES = ("--nnodes", "--num-machines", "--num-nodes")
IN_ALL = ("--num-processes",)
MPI_LAUNCHERS = frozenset({"mpirun", "mpiexec", "orterun", "prterun"})
MPI_IN_ALL = ("-n", "-np", "--n", "--np")
T = TypeVar("T")
_COMMANDS = re.compile(r"[\n;&|]")
_MODULE = re.compile(r"^-[A-Za-z]*m(?=\w)")
_VARIABLE = re.compile(r"PET_(NNODES|NPROC_PER_NODE)=(.*)")
_COUNT = re.compile(r"[1-9][0-9]{0,5}\Z")


class LauncherRequest(BaseModel):
    """What launchers ask for. A field is None if no launcher sets it, or several disagree."""

    model_config = ConfigDict(frozen=True)

    per_node: int | None = None
    in_all: int | None = None
    nodes: tuple[int, int] | None = None
    """The least and the most nodes: `--nnodes 2:4` is elastic."""
    mpi_in_all: int | None = None
    """From `mpirun -n`. On one node `mpirun` may start them all in a single rank."""

    def ranks_on(self, nodes: int) -> int | None:
        """The number of processes per node, if there are `nodes` nodes."""
        if self.per_node is None and self.in_all is not None and self.in_all % nodes == 0:
            return self.in_all // nodes
        return self.per_node


def launcher_request(run: str) -> LauncherRequest:
    """Return what the launchers in a script ask for. Takes time in proportion to the script's length."""
    commands = [command.split() for command in _COMMANDS.split(run.replace("\\\n", " "))]
    option_sets = [_options(arguments) for arguments in commands]
    return LauncherRequest(
        per_node=_only(_count(options, PER_NODE) for options in option_sets),
        in_all=_only(_count(options, IN_ALL) for options in option_sets),
        nodes=_only(_span(options) for options in option_sets),
        mpi_in_all=_only(_mpi_count(arguments) for arguments in commands),
    )


def _options(tokens: list[str]) -> dict[str, str]:
    """Return the options of a command's launcher. Options behind its program belong to the program."""
    start = _start(tokens)
    before = tokens[: start or 0]
    if start is None or any(word.startswith("#") for word in before):
        return {}
    options: dict[str, str] = {}
    name = ""
    for quoted in tokens[start:]:
        word = quoted.strip("'\"")
        if word.endswith(".py") or word.startswith("#"):
            break
        if word.startswith("-"):
            name, _, value = word.partition("=")
            name = _full(name.replace("_", "-"))
            options[name] = value
        elif name in FLAGS or not name or options[name]:
            break
        else:
            options[name] = word
    assignments = [match for word in before if (match := _VARIABLE.match(word))]
    variables = {f"--{match[1].lower().replace('_', '-')}": match[2].strip("'\"") for match in assignments}
    return {**variables, **options}


def _start(tokens: list[str]) -> int | None:
    """The position of the first word behind a launcher. None: there is no launcher."""
    for position, word in enumerate(tokens, 1):
        name = _MODULE.sub("", word.strip("'\""), count=1).rpartition("/")[2]
        if name in LAUNCHERS:
            return position
        if name in WITH_LAUNCH and tokens[position : position + 1] == ["launch"]:
            return position + 1
    return None


def _full(name: str) -> str:
    meant = (full for full, least in SHORTEST.items() if full.startswith(name) and name.startswith(least))
    return next(meant, name)


def _mpi_count(tokens: list[str]) -> int | None:
    """How many processes an `mpirun` asks for. No option with a value may stand before the number, because a
    later `-n` may be the program's own.
    """
    at = next((n for n, word in enumerate(tokens) if word.partition(".")[0] in MPI_LAUNCHERS), len(tokens))
    if any(word.startswith("#") for word in tokens[:at]):
        return None
    for position, word in enumerate(tokens[at + 1 :], at + 1):
        name, _, value = word.partition("=")
        if name in MPI_IN_ALL:
            value = value or "".join(tokens[position + 1 : position + 2])
            return int(value) if _COUNT.match(value) else None
        if not word.startswith("-"):
            break
    return None


def _count(options: dict[str, str], names: tuple[str, ...]) -> int | None:
    text = next((options[name] for name in names if name in options), "")
    return int(text) if _COUNT.match(text) else None


def _span(options: dict[str, str]) -> tuple[int, int] | None:
    low, _, high = next((options[name] for name in NODES if name in options), "").partition(":")
    if _COUNT.match(low) and (not high or _COUNT.match(high)):
        return int(low), int(high or low)
    return None


def _only(values: Iterable[T | None]) -> T | None:
    """The one value that all given values share; None if they differ."""
    distinct = {value for value in values if value is not None}
    return distinct.pop() if len(distinct) == 1 else None
