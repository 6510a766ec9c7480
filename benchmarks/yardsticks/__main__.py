"""Every yardstick, published and ours: that the simulator is right, then what the default policy is worth.

    python -m benchmarks.yardsticks [--trace DIR] [--only windows,logs,clusters,packing,policy-logs,...]

Needs the traces. Ends with 1 when a number is not as published.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.yardsticks import (
    clusters,
    coverage,
    kueue,
    logs,
    packing,
    policy_itp,
    policy_logs,
    policy_packing,
    policy_windows,
    preemption,
    speed,
    twin,
    windows,
)
from benchmarks.yardsticks.section import Section, Traces, find_traces, say

SECTIONS = (
    windows.SECTION,
    logs.SECTION,
    clusters.SECTION,
    packing.SECTION,
    twin.SECTION,
    policy_windows.SECTION,
    policy_logs.SECTION,
    policy_itp.SECTION,
    policy_packing.SECTION,
    preemption.SECTION,
    coverage.SECTION,
    speed.SECTION,
    kueue.SECTION,
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.yardsticks", description=(__doc__ or "").splitlines()[0]
    )
    names = ",".join(section.name for section in SECTIONS)
    parser.add_argument("--trace", type=Path, help="the folder of traces (default: SHOAL_TRACES)")
    parser.add_argument("--only", default=names, help=f"which, by comma: {names}")
    options = parser.parse_args()
    unknown = set(options.only.split(",")) - set(names.split(","))
    if unknown:
        parser.error(f"--only: no yardstick `{min(unknown)}`; there are {names}")
    return options


def run(section: Section, traces: Traces) -> bool:
    """Print its table. A section whose traces are absent is skipped, which is not a failure."""
    missing = traces.missing(section.needs)
    if missing:
        print(f"skipped: {section.title}: {traces.path(missing[0])} is not there\n")
        return True
    say(f"{section.name} begins")
    began = time.process_time()
    report = section.run(traces)
    print(report.text)
    say(f"{section.name} took {time.process_time() - began:.1f} CPU s")
    return report.is_right


def main() -> int:
    args = arguments()
    traces = find_traces(args.trace)
    if not traces.root.is_dir():
        print(f"The yardsticks need traces of real clusters, and there are none at {traces.root}.")
        print(
            "Name their folder with `--trace DIR` or in SHOAL_TRACES; docs/guides/yardsticks.md lists them."
        )
        return 0
    chosen = [section for section in SECTIONS if section.name in args.only.split(",")]
    are_right = [run(section, traces) for section in chosen]
    return 0 if all(are_right) else 1


if __name__ == "__main__":
    sys.exit(main())
