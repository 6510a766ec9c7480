"""`python -m tests.sim.run --seeds 20000`: many lives, on every core it is given."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed

from tests.sim.story import BrokenPromise, silence_logs, simulate, summary

CHUNK = 20


def simulate_all(first: int, count: int) -> tuple[Counter[str], list[str]]:
    """Those seeds: what happened in them, and the story of each that broke a promise."""
    silence_logs()
    seen: Counter[str] = Counter()
    failures = []
    for seed in range(first, first + count):
        try:
            seen.update(summary(simulate(seed)))
        except BrokenPromise as failure:
            failures.append(str(failure))
    return seen, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--fail-fast", action="store_true", help="stop at the first broken promise")
    options = parser.parse_args()
    began = told = time.monotonic()
    seen: Counter[str] = Counter()
    failures: list[str] = []
    done = 0
    with ProcessPoolExecutor(options.processes) as pool:
        end = options.first + options.seeds
        chunks = {
            pool.submit(simulate_all, first, min(CHUNK, end - first)): min(CHUNK, end - first)
            for first in range(options.first, end, CHUNK)
        }
        for chunk in as_completed(chunks):
            happened, broken = chunk.result()
            seen.update(happened)
            failures += broken
            done += chunks[chunk]
            for failure in broken:
                print(f"  broken: {failure.splitlines()[0]}", flush=True)
            if time.monotonic() - told > 15:
                told = time.monotonic()
                print(f"  {done} of {options.seeds} seeds, {len(failures)} failed", flush=True)
            if failures and options.fail_fast:
                pool.shutdown(cancel_futures=True)
                break
    for name, number in sorted(seen.items()):
        print(f"{number:9d} {name}")
    for failure in failures[:3]:
        print(f"\n{failure}")
    took = time.monotonic() - began
    told_end = f"{len(failures)} BROKE A PROMISE" if failures else "no promise broken"
    print(f"{done} seeds from {options.first} on in {took:.0f} s: {told_end}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
