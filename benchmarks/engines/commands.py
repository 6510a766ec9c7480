"""What programs are started, and when: wrappers first on PATH that leave a line and run the real one."""

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
    """Of the programs that whoever has `folder` first on PATH starts, and who they start with it."""

    def __init__(self, root: Path, names: Sequence[str], path: str) -> None:
        self.folder = root / "wrappers"
        self.folder.mkdir(parents=True)
        self._log = root / "commands.log"
        self._log.touch()
        for name in names:
            self.add(name, str(shutil.which(name, path=path)))

    def add(self, name: str, program: str) -> Path:
        """A wrapper of this name around that program."""
        wrapper = self.folder / name
        wrapper.write_text(WRAPPER.format(name=name, program=program, log=self._log))
        wrapper.chmod(0o755)
        return wrapper

    def read(self, since: float = 0.0) -> list[Command]:
        """What was started from then on, in that order."""
        found = parse(self._log.read_text())
        return sorted((one for one in found if one.at >= since), key=lambda one: one.at)


def parse(text: str) -> list[Command]:
    """A last line that is not whole yet is left out."""
    found = []
    for line in text.split("\n")[:-1]:
        with contextlib.suppress(ValueError):
            name, at = line.split()
            found.append(Command(name, float(at)))
    return found


def worst_second(moments: Sequence[float]) -> int:
    """How many of them lie in the fullest second, wherever that begins."""
    ordered = sorted(moments)
    return max((bisect_left(ordered, at + 1.0) - place for place, at in enumerate(ordered)), default=0)


def closest(moments: Sequence[float]) -> float | None:
    """Seconds between the two that are nearest to each other."""
    return min((later - sooner for sooner, later in pairwise(sorted(moments))), default=None)


def per_second(moments: Sequence[float], seconds: float) -> float:
    return len(moments) / seconds if seconds > 0 else 0.0
