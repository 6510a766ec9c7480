"""How long the ranks of a gang take to begin on a Ray: with Shoal's agents, and with one Ray actor per rank.

Twelve ranks on two nodes, in interleaved rounds on one idle cluster, from the request to the first
instruction of the last rank. Shoal's agents are asked as its engine asks them, for a plain process each. A
whole job is what a person waits for, with its control plane, one node agent and supervisor for each node, and
six ranks below that.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.engines.clusters import plane_on, ray_cluster
from benchmarks.engines.commands import Ledger
from benchmarks.engines.say import say
from benchmarks.measure import Doorbell, milliseconds, percentile, table, times
from benchmarks.processes import BenchmarkError
from shoal.engines.ray.client import RayClient
from shoal.engines.ray.config import RayConfig
from shoal.engines.ray.head import finder
from shoal.engines.ray.parse import parse_nodes
from tests.support.host.processes import PATH
from tests.support.planes.cluster_plane import ClusterPlane
from tests.support.ray.real_ray import RayLab

NODES, RANKS = 2, 6
WITHIN_S = 60.0
ACTORS = Path(__file__).with_name("actors_ray.py")
AGENTS, ONE_EACH, JOB = "Shoal's agents, a process each", "Ray, an actor each", "Shoal, a job of 2 x 6 ranks"
Launch = Callable[[str], None]
"""Start twelve processes that send `LABEL-0` and so on. May block for any time."""


def measure(root: Path, rounds: int) -> None:
    ledger = Ledger(root, (), PATH)
    with (
        ray_cluster(root) as lab,
        Doorbell(lab.address) as bell,
        plane_on(root, lab, ledger) as plane,
        by_agents(lab, bell, root) as agents,
        by_actors(lab, bell) as actors,
    ):
        ways = {AGENTS: agents, ONE_EACH: actors, JOB: by_job(plane, bell)}
        seconds = {name: [] for name in ways}  # type: dict[str, list[float]]
        for number in range(rounds + 1):
            for name, launch in ways.items():
                took = timed(launch, bell)
                if number:  # the first of each way warms it up
                    seconds[name].append(took)
            say(f"launch: round {number} of {rounds}")
    peer = percentile(seconds[ONE_EACH], 0.5)
    rows = [
        [
            name,
            milliseconds(percentile(took, 0.5)),
            milliseconds(max(took)),
            times(percentile(took, 0.5), peer),
        ]
        for name, took in seconds.items()
    ]
    title = f"ray: until the last of {NODES * RANKS} has begun on {NODES} nodes, {rounds} interleaved rounds"
    sys.stdout.write("\n" + table(title, ["started by", "p50", "worst", f"against {ONE_EACH}"], rows))
    sys.stdout.flush()


def timed(launch: Launch, bell: Doorbell) -> float:
    label = os.urandom(6).hex()
    asked_at = time.time()
    launch(label)
    last = max(bell.wait(f"{label}-{number}", WITHIN_S) for number in range(NODES * RANKS))
    time.sleep(2.0)  # what they leave to do is done
    return last - asked_at


@contextlib.contextmanager
def by_agents(lab: RayLab, bell: Doorbell, root: Path) -> Iterator[Launch]:
    config = RayConfig(
        address=lab.head_address,
        token_file=str(lab.token_file),
        ray_python=str(lab.python),
        spool=str(root / "spool"),
    )
    client = RayClient(
        config, namespace="launch", log_file=root / "bridge.log", find=finder(config, root), is_passing=True
    )
    nodes = [node.node_id for node in parse_nodes(client.nodes())]

    def launch(label: str) -> None:
        ringing = [f"{label}-{number}" for number in range(NODES * RANKS)]
        starts = [
            {"node_id": nodes[number % NODES], "key": label, "task": _task(bell.script(label))}
            for number, label in enumerate(ringing)
        ]
        failed = client.start(starts)["failed"]
        if failed:
            raise BenchmarkError(f"not every process was started: {failed}")

    try:
        yield launch
    finally:
        client.close()


def _task(script: str) -> dict[str, object]:
    return {"command": ["/bin/sh", "-c", script], "reap": ["/bin/true"], "env": {}, "launch_request": ""}


@contextlib.contextmanager
def by_actors(lab: RayLab, bell: Doorbell) -> Iterator[Launch]:
    command = [str(lab.python), "-P", "-s", str(ACTORS), lab.head_address, *map(str, bell.address)]
    driver = subprocess.Popen(
        command,
        env=lab.client_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    assert driver.stdin is not None
    assert driver.stdout is not None
    stdin, stdout = driver.stdin, driver.stdout

    def launch(label: str) -> None:
        stdin.write(json.dumps([f"{label}-{number}" for number in range(NODES * RANKS)]) + "\n")
        stdin.flush()
        if stdout.readline() != "begun\n":
            raise BenchmarkError(f"Ray's driver ended with {driver.wait()}")

    try:
        yield launch
    finally:
        stdin.close()
        driver.wait(WITHIN_S)


def by_job(plane: ClusterPlane, bell: Doorbell) -> Launch:
    def launch(label: str) -> None:
        run, wide = bell.script(f"{label}-$SHOAL_RANK"), {"nodes": NODES, "cpus": 1}
        plane.shoal.submit(run=run, workdir=None, resources=wide, ranks_per_node=RANKS)

    return launch
