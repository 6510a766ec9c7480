"""The share of time spent on steps that lasted, under the same faults for every system, measured in one run.

    python -m benchmarks.goodput [--minutes 3] [--only spare,tuned] [--ranks 2]

The schedule is an hour of a job on 131,072 GPUs: one fault in 0.23 hours, which is the failure rate at that
size that follows from Meta's published rate for its research clusters (arXiv:2410.21680). The hour is
compressed into `--minutes`, so a second of standstill counts for twenty. The benchmark compares systems that
recover, and says nothing about a cluster of that size. Faults are kills of a rank, at the same seconds for
all systems.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from dataclasses import dataclass

from benchmarks.measure import table
from benchmarks.recovery.__main__ import begin, strike
from benchmarks.recovery.runs import CONTESTANTS, Run, Step

MTTF_H = 0.23
WARM_STEPS = 20
SEED = 1


@dataclass(frozen=True)
class Kept:
    goodput: float
    steps: int
    faults: int


def schedule(length_s: float) -> list[float]:
    """Return when to strike, in seconds from the start."""
    dice, at, times = random.Random(SEED), 0.0, []
    while (at := at + dice.expovariate(1.0 / (MTTF_H * length_s))) < length_s:
        times.append(at)
    return times


def keep(kind: type[Run], ranks: int, length_s: float) -> Kept:
    with kind(ranks) as run:
        begin(run)
        began_at, first = time.time(), max(step.number for step in run.steps())
        faults = 0
        for at in schedule(length_s):
            time.sleep(max(0.0, began_at + at - time.time()))
            faults += _strike(run, ranks)
        time.sleep(max(0.0, began_at + length_s - time.time()))
        steps = [step for step in run.steps() if step.rank == 0]
        done = max(step.number for step in steps) - first
        return Kept(done * _step_s(steps) / length_s, done, faults)


def _strike(run: Run, ranks: int) -> int:
    """Kill the last rank. A run that stands still has no rank to kill, and has lost the time anyway."""
    pid = next(step.pid for step in reversed(run.steps()) if step.rank == ranks - 1)
    try:
        strike(run, run.process_of(pid), "kill")
    except ProcessLookupError:
        return 0
    return 1


def _step_s(steps: list[Step]) -> float:
    """Return how long a step takes without faults."""
    return statistics.median(
        after.at - before.at for before, after in itertools.pairwise(steps) if after.born == before.born
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="spare,zygote,torchrun", help="parts of rows' names, with commas")
    options = parser.parse_args()
    length_s = options.minutes * 60
    rows = []
    for name, kind in CONTESTANTS.items():
        if any(word.strip() in name for word in options.only.split(",")):
            sys.stderr.write(f"{name}: {options.minutes:g} minutes\n")
            kept = keep(kind, options.ranks, length_s)
            rows.append(
                [name, f"{kept.goodput:.1%}", str(kept.steps), f"{kept.faults} of {len(schedule(length_s))}"]
            )
    title = f"an hour of faults in {options.minutes:g} minutes, {options.ranks} ranks, measured"
    sys.stdout.write("\n" + table(title, ["", "goodput", "steps that lasted", "faults"], rows) + "\n")


if __name__ == "__main__":
    main()
