"""What a training run leaves behind, a line per step of each rank, and what a loss costs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.processes import wait_until
from benchmarks.recovery.runs import Step

STEPS = 1_000_000
"""More than any trial takes."""
TRACE = "steps.txt"
START_S, PATIENCE_S = 240.0, 240.0


class Loss(NamedTuple):
    seconds: float
    """From the loss to the next step."""
    steps: int | None
    """Steps that were made again."""


def steps_of(trace: Path) -> list[Step]:
    with contextlib.suppress(FileNotFoundError):
        lines = trace.read_text().split("\n")[:-1]
        return [Step(float(at), *map(int, rest)) for at, *rest in map(str.split, lines)]
    return []


def wait_for_steps(trace: Path, more: int) -> None:
    """Wait for this many more steps of each of two ranks."""

    def least() -> int:
        newest = {step.rank: step.number for step in steps_of(trace)}
        return min(newest.values()) if len(newest) == 2 else -1

    wait_until(lambda: least() >= 0, START_S, "a step of both ranks")
    goal = least() + more
    wait_until(lambda: least() >= goal, START_S, f"{more} more steps of both ranks")


def hit(trace: Path, strike: Callable[[], None]) -> Loss:
    """Strike, and wait until a process makes a step that did not exist before."""
    before = steps_of(trace)
    births, at = {step.born for step in before}, time.time()
    strike()
    wait_until(
        lambda: any(s.born not in births for s in steps_of(trace)), PATIENCE_S, "a step after the loss"
    )
    steps = steps_of(trace)
    first = next(step for step in steps if step.born not in births)
    last = max(step.number for step in steps if step.at <= at)
    return Loss(first.at - at, max(0, last - first.number + 1))
