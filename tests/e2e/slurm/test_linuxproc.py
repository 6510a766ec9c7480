"""A Slurm without control groups, as `shoal cluster create` makes it where a machine has none: it sends
signals to every process of a job, and finds none whose parents are gone.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.support.faults.witness import since_boot
from tests.support.planes.cluster_plane import (
    ONE_NODE,
    TWO_NODES,
    ClusterPlane,
    cluster_plane,
    is_running,
    parent_of,
)
from tests.support.planes.real import until
from tests.support.slurm.owners_plane import reachable_folder, slurm_name
from tests.support.slurm.real_slurm import SlurmLab, SlurmShape, slurm_lab, what_is_missing

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(600)]
NUM_JOBS = 8


@pytest.fixture(scope="module")
def lab() -> Iterator[SlurmLab]:
    missing = what_is_missing()
    if missing is not None:
        pytest.skip(missing)
    shape = SlurmShape(nodes=2, cpus=NUM_JOBS // 2 + 1, proctrack="linuxproc")
    with reachable_folder() as folder, slurm_lab(folder / "slurm", shape) as lab:
        yield lab


@pytest.fixture(scope="module")
def plane(lab: SlurmLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterPlane]:
    with cluster_plane(tmp_path_factory.mktemp("plane") / "home", lab) as plane:
        yield plane


def test_scancel_is_no_failure_of_jobs_without_a_retry(plane: ClusterPlane, lab: SlurmLab) -> None:
    """Nor is a preemption by Slurm, or a time limit of its own, which send the same. Some programs die of it,
    others save and end well, or with a code of their own.
    """
    saves = "import signal,sys,time; signal.signal(signal.SIGTERM, lambda *_: sys.exit({})); time.sleep(600)"
    runs = ["exec python3 -c 'import time; time.sleep(600)'"]
    runs += [f'exec python3 -c "{saves.format(code)}"' for code in (0, 1, 75)]
    jobs = [plane.submit(runs[0], resources=TWO_NODES, grace="5s")]
    jobs += [
        plane.submit(runs[number % len(runs)], resources=ONE_NODE, grace="5s") for number in range(NUM_JOBS)
    ]
    for job in jobs:
        plane.until_status(job, "running")
    lab.cancel(*(slurm_name(job, plane.attempt(job)["attempt_id"]) for job in jobs))
    until(lambda: all(plane.attempts(job)[0]["reason"] for job in jobs), "each of them has ended")
    assert {plane.attempts(job)[0]["reason"] for job in jobs} == {"lost"}
    until(lambda: all(len(plane.attempts(job)) == 2 for job in jobs), "each of them is begun anew")
    for job in jobs:
        job.stop()
    for job in jobs:
        plane.until_status(job, "cancelled")


def test_keeper_killed_alone(plane: ClusterPlane) -> None:
    """Slurm's word would be no evidence here; the supervisor's is, and it has ended all there was."""
    job = plane.start_witness(ONE_NODE)
    first = plane.attempt(job)
    supervisor, at = plane.supervisor_pid(first, first["nodes"][0]), since_boot()
    os.kill(parent_of(supervisor), signal.SIGKILL)
    until(lambda: not is_running(supervisor), "its supervisor does not outlive it for long")
    plane.until_starts(job, 2)
    again_s = plane.witness.lines(job.job_id, "start")[1].at - at
    print(f"keeper killed on a Slurm without control groups: the next attempt began after {again_s:.1f} s")
    plane.finish(job, attempts=2)
    assert plane.attempts(job)[0]["reason"] == "lost"
