"""How long it takes to look at a long queue: a page of Shoal's jobs among 100,000, beside squeue with 10,000.

    python -m benchmarks.listing [--jobs 100000] [--slurm-jobs 10000]

Slurm has no pages: squeue and slurmrestd send every job, so look at how many were listed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks import http_load
from benchmarks.measure import milliseconds, percentile, table, timed
from benchmarks.peers.prepare import prepare
from benchmarks.peers.shoal import PROJECT, Shoal
from benchmarks.peers.slurm import Slurm
from benchmarks.processes import BenchmarkError

ARRAY = 10_000
"""Jobs in one submission: the largest array Shoal takes."""
PAGE = 100


@dataclass
class Look:
    system: str
    what: str
    num_jobs: int
    num_listed: int
    each_s: list[float]


def fill_shoal(shoal: Shoal, count: int) -> None:
    """Submit `count` jobs that wait for a running one, as a user would: arrays through the API."""
    small: dict[str, Any] = {"resources": {"cpus": 0.1, "memory": "64MB"}}
    first = shoal.submit(small | {"run": "sleep 1800"})["jobs"][0]
    shoal.request(
        "PATCH",
        f"/v1/projects/{PROJECT}",
        {"max_open_jobs": count + ARRAY, "max_jobs_per_day": count + ARRAY},
    )
    for _ in range(count // ARRAY):
        shoal.submit(small | {"run": "true", "array": ARRAY, "after": [first["job_id"]]})
    wanted = 1 + count // ARRAY * ARRAY
    if (num_open := shoal.num_open()) != wanted:
        raise BenchmarkError(f"{num_open} jobs are open, not the {wanted} that were submitted")


def look_at_shoal(args: argparse.Namespace) -> list[Look]:
    with Shoal() as shoal:
        fill_shoal(shoal, args.jobs)
        first = f"/v1/jobs?limit={PAGE}"
        cursor = shoal.request("GET", first)["next_cursor"]
        paths = {
            "first page": first,
            "second page": f"{first}&cursor={cursor}",
            "queued, by name": f"{first}&status=queued&name=nobody",
            "running": f"{first}&status=running",
        }
        looks = []
        for what, path in paths.items():
            load = http_load.run(shoal.port, shoal.get_request(path), args.repeats, connections=1)
            listed = len(json.loads(load.bodies[-1])["items"])
            looks.append(Look("shoal", f"GET, {what}", args.jobs, listed, load.each_s))
        command = [shoal.run_command("")[0], "queue"]
        return [*looks, _command("shoal", "shoal queue", args.jobs, command, shoal.env)]


def look_at_slurm(args: argparse.Namespace) -> list[Look]:
    with Slurm(num_nodes=1) as slurm, slurm.rest() as rest:
        held = rest.submit_request("true", hold=True)
        http_load.run(slurm.rest_port, held, args.slurm_jobs, connections=8)
        everything = rest.get_request("jobs")
        load = http_load.run(slurm.rest_port, everything, 3, connections=1)
        listed = len(json.loads(load.bodies[-1])["jobs"])
        return [
            Look("slurm", "slurmrestd, all", args.slurm_jobs, listed, load.each_s),
            _command("slurm", "squeue", args.slurm_jobs, ["squeue", "-h"], slurm.env),
        ]


def _command(system: str, what: str, num_jobs: int, command: list[str], env: dict[str, str]) -> Look:
    """Run a command line ten times, start-up included. Lines printed are jobs listed."""
    printed: list[int] = []

    def once(_: int) -> None:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
        printed.append(len(done.stdout.splitlines()))

    _, each_s = timed(once, 10, at_once=1)
    return Look(system, what, num_jobs, printed[-1], each_s)


MEASURES: dict[str, Callable[[argparse.Namespace], list[Look]]] = {
    "shoal": look_at_shoal,
    "slurm": look_at_slurm,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="shoal,slurm", help="systems to measure, by comma")
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--slurm-jobs", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=100)
    args = parser.parse_args()
    systems = args.only.split(",")
    prepare(systems)
    looks: list[Look] = []
    skipped: list[str] = []
    for name in systems:
        print(f"filling the queue of {name} ...", file=sys.stderr, flush=True)
        try:
            looks += MEASURES[name](args)
        except BenchmarkError as error:
            skipped.append(f"skipped: {name}: {error}")
    rows = [
        [look.system, look.what, f"{look.num_jobs:,}", f"{look.num_listed:,}",
         milliseconds(percentile(look.each_s, 0.5)), milliseconds(percentile(look.each_s, 0.99))]
        for look in looks
    ]  # fmt: skip
    print(table("Listing jobs", ["system", "by", "jobs there", "listed", "p50", "p99"], rows))
    print("\n".join(skipped))
    return 1 if any("shoal" in line for line in skipped) else 0


if __name__ == "__main__":
    sys.exit(main())
