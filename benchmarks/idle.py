"""What an idle control plane costs: memory and CPU with 1,000 nodes, Shoal beside Slurm and Ray.

    python -m benchmarks.idle [--nodes 1000] [--seconds 20]

Shoal's nodes are simulated, Slurm's are configured and down, Ray has its head alone: a floor for Ray.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.measure import megabytes, table, times
from benchmarks.peers.prepare import prepare
from benchmarks.peers.ray import Ray
from benchmarks.peers.shoal import Shoal
from benchmarks.peers.slurm import Slurm
from benchmarks.processes import BenchmarkError, Usage

SETTLE_S = 10.0
"""Start-up work (migrations, the first look at the nodes) does not count as idle."""


@dataclass
class Idle:
    system: str
    what: str
    num_nodes: int
    pss_bytes: int
    cpu_share: float
    """Share of one core."""


def watch(system: str, what: str, num_nodes: int, look: Callable[[], Usage], seconds: float) -> Idle:
    """Let the system settle, then measure twice."""
    time.sleep(SETTLE_S)
    before, began = look(), time.monotonic()
    time.sleep(seconds)
    after = look()
    share = (after.cpu_s - before.cpu_s) / (time.monotonic() - began)
    return Idle(system, f"{what} ({after.num_processes})", num_nodes, after.pss_bytes, share)


def shoal_idle(args: argparse.Namespace) -> Idle:
    with Shoal(demo=f"{args.nodes}x8") as shoal:
        return watch("shoal", "control plane", args.nodes, shoal.control_usage, args.seconds)


def slurm_idle(args: argparse.Namespace) -> Idle:
    with Slurm(num_nodes=1, num_idle=args.nodes - 1) as slurm:
        return watch("slurm", "slurmctld", args.nodes, slurm.controller_usage, args.seconds)


def ray_idle(args: argparse.Namespace) -> Idle:
    with Ray() as ray:
        return watch("ray", "head with dashboard", 1, ray.usage, args.seconds)


MEASURES = {"shoal": shoal_idle, "slurm": slurm_idle, "ray": ray_idle}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="shoal,slurm,ray", help="systems to measure, by comma")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each is watched")
    args = parser.parse_args()
    systems = args.only.split(",")
    prepare(systems)
    measured: list[Idle] = []
    skipped: list[str] = []
    for name in systems:
        print(f"watching {name} do nothing ...", file=sys.stderr, flush=True)
        try:
            measured.append(MEASURES[name](args))
        except BenchmarkError as error:
            skipped.append(f"skipped: {name}: {error}")
    base = next((row.pss_bytes for row in measured if row.system == "slurm"), None)
    rows = [
        [row.system, row.what, f"{row.num_nodes:,}", megabytes(row.pss_bytes), times(row.pss_bytes, base),
         f"{row.cpu_share:.2%}"]
        for row in measured
    ]  # fmt: skip
    header = ["system", "what (processes)", "nodes", "memory", "of slurm", "CPU of a core"]
    print(table("An idle control plane", header, rows, ["memory is the proportional set size (PSS)"]))
    print("\n".join(skipped))
    return 1 if any("shoal" in line for line in skipped) else 0


if __name__ == "__main__":
    sys.exit(main())
