"""Processes of a job that is over for Slurm, and which do not die: Slurm drains their nodes for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.engines.slurm.states import SETTLE_S
from tests.contract.cluster.survival import (
    PAST_FENCE_S,
    assert_not_replaced,
    assert_restarted,
    start_stuck_jobs,
)
from tests.support.faults.hung_disk import HungDisk
from tests.support.faults.witness import since_boot
from tests.support.planes.cluster_plane import ClusterPlane, cluster_plane
from tests.support.planes.real import until
from tests.support.slurm.owners_plane import reachable_folder, slurm_name
from tests.support.slurm.real_slurm import SlurmLab, SlurmShape, slurm_lab, what_is_missing

pytestmark = [pytest.mark.engines, pytest.mark.soak, pytest.mark.timeout(600)]
UNKILLED = "Kill task failed"


@pytest.fixture
def lab() -> Iterator[SlurmLab]:
    missing = what_is_missing()
    if missing is not None:
        pytest.skip(missing)
    # As short as it may be: five times the lab's MessageTimeout.
    shape = SlurmShape(nodes=2, unkillable_s=25)
    with reachable_folder() as folder, slurm_lab(folder / "slurm", shape) as lab:
        yield lab


@pytest.fixture
def plane(lab: SlurmLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterPlane]:
    with cluster_plane(tmp_path_factory.mktemp("plane") / "home", lab) as plane:
        yield plane


def drained(lab: SlurmLab) -> set[str]:
    told = lab.run("sinfo", "-h", "-N", "-o", "%N %E")
    return {line.split()[0] for line in told.splitlines() if UNKILLED in line}


def test_what_slurm_has_ended_and_could_not_kill_is_not_replaced_until_somebody_resumed_its_node(
    plane: ClusterPlane, lab: SlurmLab, disk: HungDisk
) -> None:
    jobs = start_stuck_jobs(plane, disk)
    nodes = {node for job in jobs for node in plane.attempt(job)["nodes"]}
    lab.cancel(*(slurm_name(job, plane.attempt(job)["attempt_id"]) for job in jobs))
    ended_at = since_boot()
    until(lambda: drained(lab) == nodes, "Slurm drains their nodes", within_s=150.0)
    print(f"Slurm gave up what does not die {since_boot() - ended_at:.1f} s after scancel")
    for job in jobs:
        plane.until_explained(job, UNKILLED)
    assert_not_replaced(plane, jobs, ended_at + PAST_FENCE_S)
    disk.release()
    # Slurm does not say whose they were, nor that they are gone: an administrator has to look.
    assert_not_replaced(plane, jobs, since_boot() + SETTLE_S + 10.0)
    resumed_at = since_boot()
    for node in nodes:
        lab.resume(node)
    assert_restarted(plane, jobs)
    starts = [line.at for job in jobs for line in plane.witness.lines(job.job_id, "start")]
    again_s = min(at for at in starts if at > ended_at) - resumed_at
    print(f"the first of them is begun anew {again_s:.1f} s after nodes were resumed")
    assert again_s > SETTLE_S
