"""Record which programs are started, and when: wrappers first on PATH write a line and run the real
program.
"""

from __future__ import annotations

import contextlib
import shutil
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

SLURM = ("sbatch", "srun", "squeue", "scontrol", "sinfo", "scancel")
WRAPPER = """#!/bin/bash
echo "{name} $EPOCHREALTIME" >> {log}
exec {program} "$@"
"""


class Command(NamedTuple):
    """One start of a program, in seconds since 1970."""

    name: str
    at: float


class Ledger:
    """The programs that any process with `folder` first on PATH starts, and the programs that those start
    with it.
    """

    def __init__(self, root: Path, names: Sequence[str], path: str) -> None:
        self.folder = root / "wrappers"
        self.folder.mkdir(parents=True)
        self._log = root / "commands.log"
        self._log.touch()
        for name in names:
            self.add(name, str(shutil.which(name, path=path)))

    def add(self, name: str, program: str) -> Path:
        """Add a wrapper of this name around that program."""
        wrapper = self.folder / name
        wrapper.write_text(WRAPPER.format(name=name, program=program, log=self._log))
        wrapper.chmod(0o755)
        return wrapper

    def read(self, since: float = 0.0) -> list[Command]:
        """Return what was started from then on, in order."""
        commands = parse(self._log.read_text())
        return sorted(
            (command for command in commands if command.at >= since), key=lambda command: command.at
        )


def parse(text: str) -> list[Command]:
    """A last line that is not complete is left out."""
    commands = []
    for line in text.split("\n")[:-1]:
        with contextlib.suppress(ValueError):
            name, at = line.split()
            commands.append(Command(name, float(at)))
    return commands


def worst_second(moments: Sequence[float]) -> int:
    """Return how many of them lie in the fullest second, wherever that second begins."""
    ordered = sorted(moments)
    return max((bisect_left(ordered, at + 1.0) - place for place, at in enumerate(ordered)), default=0)


def closest(moments: Sequence[float]) -> float | None:
    """Return the seconds between the two that are closest together."""
    return min((later - sooner for sooner, later in pairwise(sorted(moments))), default=None)


def per_second(moments: Sequence[float], seconds: float) -> float:
    return len(moments) / seconds if seconds > 0 else 0.0
