"""One node of two is lost while a job trains: seconds to the next step, and steps made again.

The rows of Shoal run one job file on three engines. `shoal drill kill-node` kills the supervisor and its
ranks at once, and the machine stays. The peers lose the whole node, because that is the fault they can
recover from. So does one more row of Shoal's, in which an operator declares the node dead at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.engines.clusters import plane_on, ray_cluster, slurm_cluster
from benchmarks.engines.commands import Ledger
from benchmarks.engines.say import say
from benchmarks.engines.steps import STEPS, TRACE, Loss, hit, wait_for_steps
from benchmarks.measure import table, times
from benchmarks.peers.ray_train import PYTHON as RAY_TRAIN_PYTHON
from benchmarks.peers.ray_train import why_not as why_no_ray_train
from benchmarks.processes import BenchmarkError, wait_until
from benchmarks.recovery.runs import JOB as PLAIN_JOB
from shoal.client.handles import JobHandle
from tests.support.host.processes import PATH
from tests.support.planes.real import RealPlane, running_plane
from tests.support.ray.real_ray import RayLab
from tests.support.runtime.tasks import SOURCE
from tests.support.slurm.real_slurm import SlurmLab, SlurmShape

ROOT = Path(__file__).parents[2]
IN_NETWORK = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
JOB_FILE: dict[str, Any] = {
    "name": "train",
    "run": "python -P -m benchmarks.engines.train",
    "workdir": None,
    "resources": {"nodes": 2, "gpus": 1},
    "ranks_per_node": 1,
    "checkpoint": {},
    "retry": {"max": 100},
    "env": {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{SOURCE}", "CUDA_VISIBLE_DEVICES": ""},
}
WARM_STEPS = 100
DRILL_S, DECLARE_S = 240.0, 60.0
SBATCH = """#!/bin/bash
first=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -1)
export MASTER_ADDR=$(scontrol show node -o $first | sed 's/.*NodeAddr=\\([^ ]*\\).*/\\1/') MASTER_PORT=29555
srun --ntasks=2 --ntasks-per-node=1 sh -c \
  'RANK=$SLURM_PROCID WORLD_SIZE=2 exec {python} {program} plain {steps} {trace}'
"""


def measure(root: Path, trials: int, only: list[str]) -> None:
    rows: dict[str, list[Loss] | str] = {}
    chosen = {name: run for name, run in CONTESTANTS.items() if any(word in name for word in only)}
    for name, contestant in chosen.items():
        rows[name] = []
        place = root / f"{len(rows)}"
        place.mkdir(parents=True)
        try:
            for loss in contestant(place, trials):
                say(f"drills, {name}: next step after {loss.seconds:.1f} s, {loss.steps} steps lost")
                rows[name].append(loss)  # type: ignore[union-attr]
        except (BenchmarkError, AssertionError, subprocess.TimeoutExpired) as error:
            say(f"drills, {name}: {error}")
            rows[name] = f"not measured: {str(error).splitlines()[0][:100]}"
    sys.stdout.write("\n" + table(TITLE.format(trials=trials), HEADER, _rows(rows), NOTES))
    sys.stdout.flush()


TITLE = "One of two nodes is lost while a job trains, measured, median (least to most) of {trials}"
HEADER = ["", "seconds to the next step", "against Slurm's requeue", "steps lost"]
NOTES = (
    "Slurm: SlurmdTimeout=5 (its own default: 300), cred_expire=5 (120); a third node is free.",
    "Ray: a node is called dead after three missed checks of 2 s (its own: 5 of 3 s); Ray Train waits 60 s",
    "for the lost worker before it goes on without it. A step takes some 60 ms; all save every tenth.",
    "Shoal accepts an operator's declaration that a node is dead 20 s after the last heartbeat from there.",
)
REQUEUE = "Slurm's own requeue, the node is killed"


def _rows(results: dict[str, list[Loss] | str]) -> list[list[str]]:
    peer = results.get(REQUEUE)
    half = statistics.median([loss.seconds for loss in peer]) if peer and not isinstance(peer, str) else None
    rows = []
    for name, losses in results.items():
        if isinstance(losses, str):
            rows.append([name, losses, "-", "-"])
            continue
        seconds = sorted(loss.seconds for loss in losses)
        lost = [loss.steps for loss in losses if loss.steps is not None]
        seconds_text = f"{statistics.median(seconds):.1f} ({seconds[0]:.1f} to {seconds[-1]:.1f})"
        rows.append(
            [
                name,
                seconds_text,
                times(statistics.median(seconds), half),
                f"{statistics.median(lost):g}" if lost else "-",
            ]
        )
    return rows


# Shoal.


def shoal_here(root: Path, trials: int) -> Iterator[Loss]:
    with running_plane(root / "home") as plane:
        yield from _drills(plane, plane.home / "checkpoints", trials)


def shoal_on_slurm(root: Path, trials: int) -> Iterator[Loss]:
    with (
        slurm_cluster(root, SlurmShape()) as lab,
        plane_on(root, lab, Ledger(root, (), PATH)) as plane,
    ):
        yield from _drills(plane, plane.shared / "checkpoints", trials)


def shoal_on_ray(root: Path, trials: int) -> Iterator[Loss]:
    with ray_cluster(root) as lab, plane_on(root, lab, Ledger(root, (), PATH)) as plane:
        yield from _drills(plane, plane.shared / "checkpoints", trials)


def shoal_declared(root: Path, trials: int) -> Iterator[Loss]:
    """The whole node is killed, and an operator declares it dead at once."""
    with (
        slurm_cluster(root, SlurmShape()) as lab,
        plane_on(root, lab, Ledger(root, (), PATH)) as plane,
    ):
        job = _begin(plane)
        trace = plane.shared / "checkpoints" / job.job_id / TRACE
        for _ in range(trials):
            wait_for_steps(trace, WARM_STEPS)
            node = plane.attempt(job)["nodes"][-1]
            yield hit(trace, lambda node=node: _crash_and_declare(plane, lab, node))  # type: ignore[misc]
            lab.start_node(node)
            lab.until(lambda node=node: node in lab.usable_nodes(), f"{node} is back")  # type: ignore[misc]
            plane.command("nodes", "resume", node)
        job.stop()


def _crash_and_declare(plane: RealPlane, lab: SlurmLab, node: str) -> None:
    """Shoal does not accept that the node is dead while Slurm says that it answers, so Slurm is told first.
    Shoal also waits until no heartbeat has arrived from there for 20 s, which is most of what this row shows.
    """
    lab.crash_node(node)
    lab.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=crashed")

    def is_declared() -> bool:
        done = plane.command("nodes", "declare-dead", node, "--because", "its power was cut")
        return done.returncode == 0

    wait_until(is_declared, DECLARE_S, "Shoal takes the node for dead")


def _drills(plane: RealPlane, kept: Path, trials: int) -> Iterator[Loss]:
    job = _begin(plane)
    trace = kept / job.job_id / TRACE
    for _ in range(trials):
        wait_for_steps(trace, WARM_STEPS)
        done = plane.command("drill", "kill-node", job.ref, "--window", "2s", "--json", timeout_s=DRILL_S)
        reply = json.loads(done.stdout)["result"] if done.stdout else {}
        if done.returncode:
            raise BenchmarkError(f"drill kill-node: {reply.get('outcome')} {done.stderr}")
        yield Loss(reply["stepped_s"], reply["steps_lost"])
    job.stop()


def _begin(plane: RealPlane) -> JobHandle:
    job = plane.shoal.submit(**JOB_FILE)
    return plane.until_status(job, "running")


# The peers.


def slurm_requeue(root: Path, trials: int) -> Iterator[Loss]:
    with slurm_cluster(root, SlurmShape()) as lab:
        lab.environment.update(IN_NETWORK)
        for number in range(trials):
            trace = root / f"steps-{number}"
            values = {"python": sys.executable, "program": PLAIN_JOB, "steps": STEPS, "trace": trace}
            flags = ["--parsable", "--requeue", "-N2", "--ntasks-per-node=1", "-c1", "--gres=gpu:1", "-D/"]
            job = lab.run("sbatch", *flags, f"-o{root}/plain.log", stdin=SBATCH.format(**values)).strip()
            wait_for_steps(trace, WARM_STEPS)
            nodes = lab.run("squeue", "-h", "-j", job, "-o", "%N").strip()
            last = lab.run("scontrol", "show", "hostnames", nodes).split()[-1]
            yield hit(trace, lambda last=last: lab.crash_node(last))  # type: ignore[misc]
            lab.run("scancel", job)
            lab.start_node(last)
            lab.until(lambda: len(lab.usable_nodes()) == len(lab.names), "every node is back")
            lab.until(lambda job=job: not lab.run("squeue", "-h", "-j", job), "the job is gone")  # type: ignore[misc]


def ray_train(root: Path, trials: int) -> Iterator[Loss]:
    if why := why_no_ray_train():
        raise BenchmarkError(why)
    for number in range(trials):
        place = root / str(number)
        with ray_cluster(place, python=RAY_TRAIN_PYTHON) as lab, _ray_train_run(place, lab) as trace:
            wait_for_steps(trace, WARM_STEPS)
            yield hit(trace, lambda: lab.crash_node(lab.names[-1]))


@contextlib.contextmanager
def _ray_train_run(root: Path, lab: RayLab) -> Iterator[Path]:
    trace, program = root / "steps", ("-P", "-m", "benchmarks.engines.train_ray")
    env = lab.client_environment() | IN_NETWORK | {"PYTHONPATH": f"{ROOT}:{SOURCE}"}
    command = [
        str(RAY_TRAIN_PYTHON),
        *program,
        lab.head_address,
        str(root / "storage"),
        str(trace),
        str(STEPS),
    ]
    with (root / "driver.log").open("wb") as driver_log:
        driver = subprocess.Popen(
            command, env=env, stdout=driver_log, stderr=driver_log, start_new_session=True
        )
    try:
        yield trace
    except BenchmarkError as error:
        driver_lines = (root / "driver.log").read_text(errors="replace").strip().splitlines()
        raise BenchmarkError(
            f"{error}; last line of the driver: {driver_lines[-1] if driver_lines else 'nothing'}"
        ) from error
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()


CONTESTANTS: dict[str, Callable[[Path, int], Iterator[Loss]]] = {
    "Shoal on this machine, drill kill-node": shoal_here,
    "Shoal on Slurm, drill kill-node": shoal_on_slurm,
    "Shoal on Ray, drill kill-node": shoal_on_ray,
    "Shoal on Slurm, the node is killed and declared dead": shoal_declared,
    REQUEUE: slurm_requeue,
    "Ray Train, elastic, the node is killed": ray_train,
}
