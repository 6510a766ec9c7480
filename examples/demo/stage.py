"""What the demo says and types: headings, plain words, and `shoal` commands that are really run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from shoal.client import Shoal

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
COMMAND_S = 120.0
PATIENCE_S = 120.0
POLL_S = 0.1


class NotSeen(Exception):
    """The demo waited for something that did not come."""


class Stage:
    """One cluster, in a home of its own, and somebody typing."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = environment(home)
        self._num_acts = 0

    def act(self, title: str) -> None:
        self._num_acts += 1
        say(f"\n=== {self._num_acts}. {title}")

    def shoal(self, *argv: str, expect: int = 0) -> None:
        """Show the command and run it; all it says goes where ours goes. `NotSeen`: another exit code."""
        shown = shlex.join(("shoal", *argv))
        say(f"\n$ {shown}")
        code = self._run(argv, stdout=None)
        if code != expect:
            raise NotSeen(f"`{shown}` ended with exit code {code}, not {expect}")

    def quietly(self, *argv: str) -> int:
        """Run `shoal` without a word."""
        return self._run(argv, stdout=subprocess.DEVNULL)

    def _run(self, argv: tuple[str, ...], stdout: int | None) -> int:
        command = [sys.executable, "-m", "shoal.cli.main", *argv]
        done = subprocess.run(
            command,
            env=self.env,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            timeout=COMMAND_S,
            check=False,
        )
        return done.returncode

    def client(self) -> Shoal:
        return Shoal(env=self.env)


def environment(home: Path) -> dict[str, str]:
    """Ours, with the demo's home instead of the user's, and this Python first: jobs find torch with it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    here = str(Path(sys.executable).parent)
    path = f"{here}:{kept.get('PATH', os.defpath)}"
    return {**kept, "SHOAL_HOME": str(home), "PATH": path}


def say(text: str) -> None:
    print(text, flush=True)


def until(look: Callable[[], T | None], what: str) -> T:
    """What `look` finds, as soon as it finds something. `NotSeen` after two minutes."""
    deadline = time.monotonic() + PATIENCE_S
    while (seen := look()) is None:
        if time.monotonic() > deadline:
            raise NotSeen(f"waited {PATIENCE_S:g} s for {what}")
        time.sleep(POLL_S)
    return seen
