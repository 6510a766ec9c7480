"""What a kill cost, from the times in logs and events: steps made twice, and time in which none was new.

Measured times in, numbers and a table out; asks nobody.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from examples.demo.stage import rows, say

STEP = re.compile(r"step +(\d+) of \d+")
HEADS = ("killed", "pid", "attempts", "steps again", "ranks up", "next step", "GPU-seconds")


@dataclass(frozen=True)
class Kill:
    """What was killed, when, and in which group of ranks. `back_at`: only for what ends none."""

    what: str
    pid: int
    at: float
    attempt: int
    group: int = 0
    back_at: float | None = None


@dataclass(frozen=True)
class Step:
    """The end of one training step, as its log line tells it."""

    at: float
    number: int
    attempt: int
    group: int = 0
    """Which group of ranks of the attempt: a step made again begins the next."""


@dataclass(frozen=True)
class Cost:
    """Of one kill.

    `pause_s`: from the kill to the end of the next step. `lost_s`: from the end of the last step that
    counted to the start of the one that followed it: the steps made in vain, and the restart.
    """

    num_attempts: int
    num_repeated: int
    pause_s: float
    lost_s: float


def steps_of(lines: list[dict[str, Any]], attempt: int) -> list[Step]:
    """The steps one attempt's log tells of, in order."""
    found: list[Step] = []
    for line in lines:
        match = STEP.match(line["text"])
        if match is None:
            continue
        number, last = int(match[1]), found[-1] if found else None
        group = 0 if last is None else last.group + (number <= last.number)
        found.append(Step(line["at"], number, attempt, group))
    return found


def usual_step_s(steps: list[Step]) -> float:
    """The median time between two steps of one group."""
    return median(b.at - a.at for a, b in pairwise(steps) if (a.attempt, a.group) == (b.attempt, b.group))


def cost_of(kill: Kill, steps: list[Step]) -> Cost:
    """`steps`: of all attempts, in order."""
    return _of_restart(kill, steps) if kill.back_at is None else _of_absence(kill, kill.back_at, steps)


def _of_restart(kill: Kill, steps: list[Step]) -> Cost:
    """The group ended, and a later one went on from a checkpoint."""
    killed = (kill.attempt, kill.group)
    before = [step for step in steps if (step.attempt, step.group) <= killed]
    first = next(step for step in steps if (step.attempt, step.group) > killed)
    usual_s = usual_step_s(steps)
    kept = [step.at for step in before if step.number == first.number - 1]
    kept_at = kept[-1] if kept else before[0].at - usual_s
    return Cost(
        num_attempts=first.attempt - kill.attempt,
        num_repeated=before[-1].number - first.number + 1,
        pause_s=first.at - kill.at,
        lost_s=first.at - usual_s - kept_at,
    )


def _of_absence(kill: Kill, back_at: float, steps: list[Step]) -> Cost:
    """No attempt ended: what is lost is how much longer than usual a step took meanwhile."""
    during = [step for step in steps if step.attempt == kill.attempt]
    gaps = [b.at - a.at for a, b in pairwise(during) if b.at > kill.at and a.at < back_at]
    following = next(step for step in during if step.at > kill.at)
    return Cost(
        num_attempts=0,
        num_repeated=0,
        pause_s=following.at - kill.at,
        lost_s=max(max(gaps) - usual_step_s(steps), 0.0),
    )


def print_bill(kills: list[Kill], steps: list[Step], attempts: list[dict[str, Any]], num_gpus: int) -> None:
    """A line for each kill, and what the columns mean."""
    say(rows(HEADS, [_line(kill, cost_of(kill, steps), attempts, num_gpus) for kill in kills]))
    say(
        f"\nMeasured, from the times in logs and events; a step usually takes {usual_step_s(steps):.2f} s.\n"
        "  steps again   made after the last checkpoint, lost, and made once more\n"
        "  ranks up      from the kill until all ranks of a new attempt ran: Shoal's part\n"
        "  next step     from the kill to the end of the next step; after a supervisor's end\n"
        "                the program starts and imports torch in this time\n"
        f"  GPU-seconds   {num_gpus} GPUs x (last step that counts .. start of the one after it)"
    )


def _line(kill: Kill, cost: Cost, attempts: list[dict[str, Any]], num_gpus: int) -> tuple[str, ...]:
    up_at = attempts[kill.attempt + cost.num_attempts - 1]["started_at"]
    return (
        kill.what,
        str(kill.pid),
        f"+{cost.num_attempts}",
        str(cost.num_repeated),
        f"{up_at - kill.at:.1f} s" if cost.num_attempts else "-",
        f"{cost.pause_s:.1f} s",
        f"{cost.lost_s * num_gpus:.1f}",
    )
