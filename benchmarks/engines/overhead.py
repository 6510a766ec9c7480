"""From submitting to the job's first instruction: through Shoal, and without it, on one idle cluster.

Rounds are interleaved, so other load of the machine affects every way alike. Where Shoal's own time goes is
read from what its parts leave behind: wrappers of the programs they start, and file times.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.engines.clusters import plane_on, ray_cluster, slurm_cluster
from benchmarks.engines.commands import SLURM, Ledger
from benchmarks.engines.say import say
from benchmarks.measure import Doorbell, milliseconds, percentile, table, times
from benchmarks.processes import BenchmarkError
from tests.support.host.processes import PATH
from tests.support.planes.real import RealPlane
from tests.support.ray.real_ray import RayLab
from tests.support.slurm.real_slurm import SlurmLab, SlurmShape

WITHIN_S = 120.0
SHOAL = Path(sys.executable).with_name("shoal")
SMALL = {"cpus": 1}
BY_HTTP, BY_COMMAND = "Shoal, SDK", "Shoal, shoal run -d"


class Way(NamedTuple):
    """One way to submit a line of shell. `submit` blocks until the job is accepted, and may name the job."""

    name: str
    submit: Callable[[str], str | None]
    peer: str
    """The way it is compared with. A way that others are compared with has its own name here."""


class Start(NamedTuple):
    """One job; seconds since 1970."""

    asked_at: float
    answered_at: float
    first_at: float
    job_id: str | None


def measure(root: Path, engines: list[str], starts: int) -> None:
    """Print a table for each engine as soon as it is measured."""
    for engine in engines:
        with CLUSTERS[engine](root / engine) as (ways, plane, ledger, bell):
            results = rounds(engine, ways, bell, starts)
            parts = [_parts(plane, ledger, start) for start in results[BY_HTTP]]
        title = f"{engine}: from submitting to the first instruction, measured, {starts} interleaved rounds"
        sys.stdout.write("\n" + table(title, HEADER, [_row(way, results) for way in ways]))
        rows = [[name, milliseconds(percentile([p[name] for p in parts], 0.5))] for name in parts[0]]
        sys.stdout.write("\n" + table(f"{engine}: what {BY_HTTP}'s time is made of", ["until", "p50"], rows))
        sys.stdout.flush()


def rounds(engine: str, ways: list[Way], bell: Doorbell, starts: int) -> dict[str, list[Start]]:
    """Run one job at a time. The first of each way warms it up and is not counted.

    The gaps are random. Slurm looks at its queue once a second, and a fixed gap would always meet it at the
    same moment of that second.
    """
    gaps, starts_by_way = random.Random(starts), dict[str, list[Start]]()
    for number in range(starts + 1):
        for way in ways:
            label = os.urandom(6).hex()
            asked_at = time.time()
            job_id = way.submit(bell.script(label))
            answered_at = time.time()
            start = Start(asked_at, answered_at, bell.wait(label, WITHIN_S), job_id)
            if number:
                starts_by_way.setdefault(way.name, []).append(start)
            time.sleep(gaps.uniform(1.0, 2.0))  # what a job leaves to do is done
        say(f"overhead, {engine}: round {number} of {starts}")
    return starts_by_way


HEADER = ["submitted by", "jobs", "p50", "p95", "against", "p50 ratio", "p50 more", "accepted after, p50"]


def _row(way: Way, starts_by_way: dict[str, list[Start]]) -> list[str]:
    took = [start.first_at - start.asked_at for start in starts_by_way[way.name]]
    peer = percentile([start.first_at - start.asked_at for start in starts_by_way[way.peer]], 0.5)
    half = percentile(took, 0.5)
    accepted = percentile([start.answered_at - start.asked_at for start in starts_by_way[way.name]], 0.5)
    return [
        way.name,
        str(len(took)),
        milliseconds(half),
        milliseconds(percentile(took, 0.95)),
        way.peer if way.peer != way.name else "-",
        times(half, peer) if way.peer != way.name else "-",
        milliseconds(half - peer) if way.peer != way.name else "-",
        milliseconds(accepted),
    ]


def _parts(plane: RealPlane, ledger: Ledger, start: Start) -> dict[str, float]:
    """Return the seconds from each mark of one job to the next."""
    job = plane.shoal.job(start.job_id or "")
    attempt = job.data["attempts"][-1]["attempt_id"]
    (share,) = (plane.home / "desk").glob(f"*/{attempt}/*")
    began = {
        command.name: command.at for command in ledger.read(start.asked_at) if command.at <= start.first_at
    }
    marks = {
        "Shoal has accepted it": start.answered_at,
        "it is placed, its order is laid down": (share / "task_spec.json").stat().st_mtime,
        "sbatch is started": began.get("sbatch"),
        "Slurm has started the batch step, which starts srun": began.get("srun"),
        "the keeper's Python is started": began["python"],
        "the keeper has fetched its order (Python's start, TLS)": (share / "claimed").stat().st_mtime,
        "first instruction (supervisor's start)": start.first_at,
    }
    parts, last = {}, start.asked_at
    for name, at in marks.items():
        if at is not None:
            parts[name], last = at - last, at
    return parts


Prepared = tuple[list[Way], RealPlane, Ledger, Doorbell]


@contextlib.contextmanager
def on_slurm(root: Path) -> Iterator[Prepared]:
    ledger = Ledger(root, SLURM, PATH)
    with (
        slurm_cluster(root, SlurmShape(nodes=2)) as lab,
        Doorbell(lab.address) as bell,
        plane_on(root, lab, ledger) as plane,
    ):
        yield [_plain_slurm(lab), *_through_shoal(plane, root, "sbatch")], plane, ledger, bell


def _plain_slurm(lab: SlurmLab) -> Way:
    def submit(script: str) -> None:
        lab.run("sbatch", "--parsable", "-n1", "-c1", "-o/dev/null", "-D/", "--wrap", script)

    return Way("sbatch", submit, "sbatch")


@contextlib.contextmanager
def on_ray(root: Path) -> Iterator[Prepared]:
    ledger = Ledger(root, (), PATH)
    with (
        ray_cluster(root) as lab,
        Doorbell(lab.address) as bell,
        plane_on(root, lab, ledger) as plane,
    ):
        ways = [_ray_command(lab), _ray_http(lab), *_through_shoal(plane, root, "ray job submit")]
        yield ways, plane, ledger, bell


def _ray_command(lab: RayLab) -> Way:
    command = [*lab.ray_command("job", "submit", "--no-wait", "--entrypoint-num-cpus=1"), "--", "bash", "-c"]
    env = lab.client_environment()

    def submit(script: str) -> None:
        done = subprocess.run([*command, script], env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchmarkError(f"ray job submit exited with {done.returncode}: {done.stderr[-500:]}")

    return Way("ray job submit", submit, "ray job submit")


def _ray_http(lab: RayLab) -> Way:
    """Send what the Jobs SDK sends."""
    headers = {"Authorization": f"Bearer {lab.token_file.read_text()}", "Content-Type": "application/json"}

    def submit(script: str) -> None:
        body = json.dumps({"entrypoint": script, "entrypoint_num_cpus": 1}).encode()
        request = urllib.request.Request(f"{lab.jobs_url}/api/jobs/", body, headers, method="POST")
        with urllib.request.urlopen(request, timeout=WITHIN_S) as answer:
            answer.read()

    return Way("Ray, Jobs API", submit, "ray job submit")


def _through_shoal(plane: RealPlane, root: Path, peer: str) -> list[Way]:
    empty = root / "empty"
    empty.mkdir()

    def by_command(script: str) -> None:
        command = [str(SHOAL), "run", "-d", "--cpus", "1", "--", "sh", "-c", script]
        done = subprocess.run(command, env=plane.env, cwd=empty, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchmarkError(f"shoal run -d exited with {done.returncode}: {done.stderr[-500:]}")

    def by_http(script: str) -> str:
        return plane.submit(script, resources=SMALL).job_id

    return [Way(BY_COMMAND, by_command, peer), Way(BY_HTTP, by_http, peer)]


CLUSTERS: dict[str, Callable[[Path], contextlib.AbstractContextManager[Prepared]]] = {
    "slurm": on_slurm,
    "ray": on_ray,
}
