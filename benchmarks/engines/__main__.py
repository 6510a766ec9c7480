"""What Shoal costs and gains on a real Slurm and a real Ray: `python -m benchmarks.engines [SECTION...]`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from benchmarks import private_network
from benchmarks.engines import drills, launch, overhead, queued
from benchmarks.engines.say import say
from benchmarks.processes import BenchmarkError
from tests.support.host.processes import PATH

SECTIONS = ("overhead", "launch", "queue", "drills")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)} (all)")
    parser.add_argument("--only", default="slurm,ray", help="engines of `overhead`, by comma")
    parser.add_argument("--starts", type=int, default=20, help="interleaved rounds of `overhead`")
    parser.add_argument("--launches", type=int, default=5, help="interleaved rounds of `launch`")
    parser.add_argument("--jobs", type=int, default=1000, help="jobs of `queue`")
    parser.add_argument("--trials", type=int, default=3, help="losses for each row of `drills`")
    parser.add_argument("--rows", default="", help="words of the rows of `drills` to measure, by comma (all)")
    parser.add_argument("--nodes", type=int, default=64, help="nodes of `queue`")
    options = parser.parse_args()
    sections = options.sections or SECTIONS
    if unknown := sorted(set(sections) - set(SECTIONS)):
        parser.error(f"no section {unknown[0]}; there are {', '.join(SECTIONS)}")
    os.environ["PATH"] = PATH  # jobs on this machine find the same Python as those on nodes
    private_network.enter()  # the daemons of both listen on every address
    cores = os.cpu_count()
    sys.stdout.write(f"{cores} cores, load {os.getloadavg()[0]:.1f} before\n")
    with tempfile.TemporaryDirectory(prefix="engines-", dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        for section in sections:
            say(f"section {section}")
            if section == "overhead":
                overhead.measure(Path(folder) / section, options.only.split(","), options.starts)
            elif section == "launch":
                launch.measure(Path(folder) / section, options.launches)
            elif section == "queue":
                queued.measure(Path(folder) / section, options.nodes, options.jobs)
            else:
                drills.measure(Path(folder) / section, options.trials, options.rows.split(","))
    sys.stdout.write(f"load {os.getloadavg()[0]:.1f} after\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchmarkError as error:
        sys.exit(f"error: {error}")
