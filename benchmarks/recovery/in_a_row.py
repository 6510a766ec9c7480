"""One run of Shoal with a spare loses a rank again and again: how often it resumes, and how fast. Measured.

python -m benchmarks.recovery.in_a_row [--faults 100] [--ranks 2]
"""

from __future__ import annotations

import argparse
import statistics
import sys

from benchmarks.recovery.__main__ import Trial, trials_of
from benchmarks.recovery.runs import Shoal

BETWEEN = 12
"""Steps that all ranks make before the next fault."""


def many(ranks: int, faults: int) -> list[Trial]:
    trials: list[Trial] = []
    for trial in trials_of(Shoal, ranks, "kill", faults, BETWEEN):
        trials.append(trial)
        if trial.seconds is None:
            break
        if len(trials) % 10 == 0:
            sys.stderr.write(f"{len(trials)} of {faults}\n")
    return trials


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    trials = many(options.ranks, options.faults)
    if any(trial.seconds is None for trial in trials):
        raise SystemExit(f"fault {len(trials)} of {options.faults} in a row was never recovered from")
    seconds = [trial.seconds for trial in trials if trial.seconds is not None]
    sys.stdout.write(
        f"{len(seconds)} of {options.faults} faults in a row recovered from, "
        f"{options.ranks} ranks, measured: "
        f"median {statistics.median(seconds):.2f} s, worst {max(seconds):.2f} s, "
        f"{sum(trial.lost for trial in trials)} steps lost in all\n"
    )


if __name__ == "__main__":
    main()
