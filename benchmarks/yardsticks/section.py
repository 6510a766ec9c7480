"""What every table of the yardsticks is: a name, the traces it needs, and a run that returns text."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DEFAULT_TRACES = Path(__file__).parents[3] / "shared" / "traces"


@dataclass(frozen=True)
class Traces:
    """A folder with `swf/`, `gpu/` and `openb/` in it."""

    root: Path

    def path(self, name: str) -> Path:
        return self.root / name

    def missing(self, names: tuple[str, ...]) -> list[str]:
        return [name for name in names if not self.path(name).is_file()]


@dataclass(frozen=True)
class Report:
    text: str
    is_right: bool
    """Whether every number is as it must be."""


@dataclass(frozen=True)
class Section:
    name: str
    """What `--only` accepts."""
    title: str
    needs: tuple[str, ...]
    """Files of the trace folder."""
    run: Callable[[Traces], Report]


def find_traces(given: Path | None) -> Traces:
    """`--trace`, or `SHOAL_TRACES`, or the folder `shared` beside the checkout."""
    return Traces(given or Path(os.environ.get("SHOAL_TRACES") or DEFAULT_TRACES))


def say(text: str) -> None:
    """Print progress for a person who waits. Only the tables go to standard output."""
    print(f"  ... {text}", file=sys.stderr, flush=True)
