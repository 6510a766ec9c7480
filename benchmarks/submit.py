"""Submits per second, and the time from submitting to the job's first instruction: Shoal, Slurm, Ray.

    python -m benchmarks.submit [--only shoal,slurm,ray] [--jobs 2000] [--starts 30]

Rates are measured with jobs that wait for another job, so that no system runs anything during the
measurement. Then the controller is killed (SIGKILL) right after an acknowledgement, and the jobs it still
knows are counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks import http_load
from benchmarks.measure import Doorbell, milliseconds, percentile, table, timed, times
from benchmarks.peers.prepare import prepare
from benchmarks.peers.ray import Ray
from benchmarks.peers.shoal import Shoal
from benchmarks.peers.slurm import Slurm, missing
from benchmarks.processes import BenchmarkError, Usage

SubmitAll = Callable[[int], tuple[float, list[float]]]
"""Takes the number of parallel submits. Returns the whole time, and the time of each submit."""

NUM_CLI = 100
"""Commands run for each rate of a command line."""
NUM_KILLED = 200
"""Jobs acknowledged before each kill."""
SLURM_SAVES_WITHIN_S = 7.0
"""slurmctld writes its jobs to disk about every 5 s."""


@dataclass
class Rate:
    system: str
    how: str
    at_once: int
    per_s: float
    each_s: list[float]
    server_cpu_s: float
    """CPU of the servers per submit. Unlike the rate, it hardly depends on other load of the machine."""


@dataclass
class StartTimes:
    system: str
    how: str
    each_s: list[float]


@dataclass
class Kept:
    system: str
    how: str
    acknowledged: int
    known_after: int


@dataclass
class Results:
    """Everything measured in one run."""

    rates: list[Rate] = field(default_factory=list)
    starts: list[StartTimes] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def add_starts(self, system: str, how: str, each_s: list[float]) -> None:
        self.starts.append(StartTimes(system, how, each_s))

    def add_rate(
        self, system: str, how: str, at_once: int, *, submit_all: SubmitAll, look: Callable[[], Usage]
    ) -> None:
        """Run `submit_all(at_once)`, and measure the servers before and after."""
        before = look().cpu_s
        wall_s, each_s = submit_all(at_once)
        cpu_s = (look().cpu_s - before) / len(each_s)
        self.rates.append(Rate(system, how, at_once, len(each_s) / wall_s, each_s, cpu_s))


def by_http(port: int, make: Callable[[], http_load.Render], count: int, expect: int = 200) -> SubmitAll:
    """Submit over keep-alive connections. `make` prepares new requests with new keys for each run."""

    def submit_all(at_once: int) -> tuple[float, list[float]]:
        load = http_load.run(port, make(), count, connections=at_once, expect=expect)
        return load.wall_s, load.each_s

    return submit_all


def by_command(command: list[str], env: Mapping[str, str], count: int = NUM_CLI) -> SubmitAll:
    """Start one process per submit, as people and scripts do."""
    return lambda at_once: timed(lambda _: _run(command, env), count, at_once=at_once)


def _run(command: list[str], env: Mapping[str, str]) -> None:
    done = subprocess.run(command, env=env, cwd=env["HOME"], capture_output=True, timeout=60, check=False)
    if done.returncode:
        raise BenchmarkError(f"`{' '.join(command)}` exited with {done.returncode}: {done.stderr[-500:]!r}")


def start_times(doorbell: Doorbell, submit: Callable[[str], object], count: int) -> list[float]:
    """Submit one job at a time and measure from the beginning of the submit to the job's first line.

    The gap between jobs is random. Slurm places batch jobs once a second, and a fixed gap would always meet
    it at the same moment of that second.
    """
    gaps = random.Random(count)
    each = []
    for _ in range(count):
        label = os.urandom(6).hex()
        began = time.time()
        submit(doorbell.script(label))
        each.append(doorbell.wait(label, 60) - began)
        time.sleep(gaps.uniform(0.2, 1.2))
    return each


def measure_shoal(results: Results, doorbell: Doorbell, args: argparse.Namespace) -> None:
    small: dict[str, Any] = {"resources": {"cpus": 0.1, "memory": "64MB"}}
    flags = ("--cpus", "0.1", "--memory", "64MB")
    with Shoal() as shoal:

        def over_http(script: str) -> None:
            shoal.submit(small | {"run": script})

        def by_cli(script: str) -> None:
            _run(shoal.run_command(script, *flags), shoal.env)

        results.add_starts("shoal", "HTTP", start_times(doorbell, over_http, args.starts))
        results.add_starts("shoal", "shoal run -d", start_times(doorbell, by_cli, args.starts))
        blocker = shoal.submit(small | {"run": "sleep 900"})["jobs"][0]["job_id"]
        waiting = small | {"run": "true", "after": [blocker]}
        many = by_http(shoal.port, lambda: shoal.submit_request(waiting), args.jobs, expect=201)
        for at_once in (1, 8, 32):
            results.add_rate("shoal", "HTTP", at_once, submit_all=many, look=shoal.control_usage)
        many = by_command(shoal.run_command("true", "--after", blocker, *flags), shoal.env)
        for at_once in (1, 8):
            results.add_rate("shoal", "shoal run -d", at_once, submit_all=many, look=shoal.control_usage)
        before = shoal.num_open()
        render = shoal.submit_request(waiting)
        http_load.run(shoal.port, render, NUM_KILLED, connections=8, expect=201)
        shoal.kill()
        shoal.start()
        results.kept.append(Kept("shoal", "HTTP", NUM_KILLED, shoal.num_open() - before))


def measure_slurm(results: Results, doorbell: Doorbell, args: argparse.Namespace) -> None:
    if why := missing():
        raise BenchmarkError(why)
    with Slurm(num_nodes=2) as slurm, slurm.rest() as rest:
        results.add_starts("slurm", "sbatch", start_times(doorbell, slurm.sbatch, args.starts))
        results.add_starts("slurm", "slurmrestd", start_times(doorbell, rest.submit, args.starts))
        blocker = slurm.sbatch("sleep 900")
        render = rest.submit_request("true", dependency=f"afterok:{blocker}")
        many = by_http(slurm.rest_port, lambda: render, args.jobs)
        for at_once in (1, 8, 32):
            results.add_rate("slurm", "slurmrestd", at_once, submit_all=many, look=slurm.server_usage)
        many = by_command(slurm.sbatch_command("true", f"--dependency=afterok:{blocker}"), slurm.env)
        for at_once in (1, 8):
            results.add_rate("slurm", "sbatch", at_once, submit_all=many, look=slurm.server_usage)
        time.sleep(SLURM_SAVES_WITHIN_S)  # what came before is safe; only the next jobs are at stake
        before = slurm.num_queued()
        http_load.run(slurm.rest_port, render, NUM_KILLED, connections=8)
        slurm.kill_controller()
        slurm.start_controller()
        results.kept.append(Kept("slurm", "slurmrestd", NUM_KILLED, slurm.num_queued() - before))


def measure_ray(results: Results, doorbell: Doorbell, args: argparse.Namespace) -> None:
    with Ray() as ray:
        warm = "warm"  # the first job of a head pays for imports: it is not counted
        ray.run_submit(doorbell.script(warm))
        doorbell.wait(warm, 60)
        few = max(3, args.starts // 5)
        results.add_starts("ray", "ray job submit", start_times(doorbell, ray.run_submit, few))
        # More CPUs than there are: accepted, and never started.
        command = ray.submit_command("true", "--entrypoint-num-cpus", "1000")
        for at_once in (1, 4):
            few_more = by_command(command, ray.env, 10 * min(at_once, 2))
            results.add_rate("ray", "ray job submit", at_once, submit_all=few_more, look=ray.usage)


MEASURES: dict[str, Callable[[Results, Doorbell, argparse.Namespace], None]] = {
    "ray": measure_ray,
    "slurm": measure_slurm,
    "shoal": measure_shoal,
}


def render(results: Results) -> str:
    parts = []
    rest = max((rate.per_s for rate in results.rates if rate.how == "slurmrestd"), default=None)  # its best
    rows = [
        [r.system, r.how, str(r.at_once), f"{r.per_s:,.1f}", milliseconds(percentile(r.each_s, 0.5)),
         milliseconds(percentile(r.each_s, 0.99)), milliseconds(r.server_cpu_s), times(r.per_s, rest)]
        for r in results.rates
    ]  # fmt: skip
    header = ["system", "submitted by", "at once", "submits/s", "p50", "p99", "server CPU", "of slurmrestd"]
    parts.append(table("Submits per second, of jobs that wait for another", header, rows, DURABILITY))
    sbatch = _median(results, "sbatch")
    ray = _median(results, "ray job submit")
    rows = [
        [s.system, s.how, str(len(s.each_s)), milliseconds(percentile(s.each_s, 0.5)),
         milliseconds(percentile(s.each_s, 0.99)), times(percentile(s.each_s, 0.5), sbatch),
         times(percentile(s.each_s, 0.5), ray)]
        for s in results.starts
    ]  # fmt: skip
    header = ["system", "submitted by", "jobs", "p50", "p99", "of sbatch", "of ray"]
    parts.append(table("From submitting to the job's first instruction, on an idle cluster", header, rows))
    rows = [[k.system, k.how, str(k.acknowledged), str(k.known_after)] for k in results.kept]
    header = ["system", "submitted by", "acknowledged", "known after kill -9 and restart"]
    parts.append(table("Acknowledged, then the controller is killed at once", header, rows))
    return "\n".join([*parts, *(f"skipped: {line}" for line in results.skipped)])


DURABILITY = (
    "shoal: acknowledged after the commit reached the disk. slurm: saved every 5 s, so an acknowledgement",
    "can be lost. ray: kept in memory without an external store. The last table is measured, not claimed.",
)


def _median(results: Results, how: str) -> float | None:
    return next((percentile(s.each_s, 0.5) for s in results.starts if s.how == how), None)


def as_json(results: Results) -> str:
    def timing(each_s: list[float]) -> dict[str, Any]:
        return {"count": len(each_s), "p50_s": percentile(each_s, 0.5), "p99_s": percentile(each_s, 0.99)}

    document = {
        "rates": [
            {
                "system": r.system,
                "how": r.how,
                "at_once": r.at_once,
                "per_s": r.per_s,
                "server_cpu_s": r.server_cpu_s,
                **timing(r.each_s),
            }
            for r in results.rates
        ],
        "starts": [{"system": s.system, "how": s.how, **timing(s.each_s)} for s in results.starts],
        "kept": [vars(kept_jobs) for kept_jobs in results.kept],
        "skipped": results.skipped,
    }
    return json.dumps(document, indent=2)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="ray,slurm,shoal", help="systems to measure, by comma")
    parser.add_argument("--jobs", type=int, default=2000, help="requests for each rate over HTTP")
    parser.add_argument("--starts", type=int, default=30, help="jobs for each start latency (Ray: a fifth)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    args = parser.parse_args()
    systems = args.only.split(",")
    prepare(systems)
    results = Results()
    with Doorbell() as doorbell:
        for name in systems:
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
            try:
                MEASURES[name](results, doorbell, args)
            except (BenchmarkError, TimeoutError) as error:
                results.skipped.append(f"{name}: {error}")
    print(as_json(results) if args.json else render(results))
    return 1 if any(line.startswith("shoal") for line in results.skipped) else 0


if __name__ == "__main__":
    sys.exit(main())
