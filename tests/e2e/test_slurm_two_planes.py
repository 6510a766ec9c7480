"""Two control planes over one Slurm: the leader is killed, and keepers and supervisors find the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.client import Shoal
from shoal.client.handles import JobHandle
from tests.support.cluster_plane import SOME
from tests.support.postgres import PostgresServer, postgres
from tests.support.real_plane import until
from tests.support.shares import SOURCE
from tests.support.slurm_lab import SlurmLab
from tests.support.two_planes import TAKEOVER_S, TwoPlanes, two_planes
from tests.support.witness import Witness

__all__ = ["postgres"]  # pytest finds the fixture by its name

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(400)]
NODES_PORTS = (7474, 7475)


@pytest.fixture
def planes(slurm: SlurmLab, postgres: PostgresServer, tmp_path: Path) -> Iterator[TwoPlanes]:
    url = postgres.url(postgres.new_database())
    made = TwoPlanes(tmp_path, url, "--mount-roots", str(tmp_path), demo="none")
    for port, one in zip(NODES_PORTS, (made.first, made.second), strict=True):
        one.env |= {name: slurm.environment[name] for name in ("SLURM_CONF", "PATH")}
        one.env |= {"SHOAL_DATABASE_URL": url, "SHOAL_SHARED": str(made.shared)}
        words = ("--python-path", SOURCE, "--spool", str(tmp_path / "spool"))
        at = ("--nodes-on", f"{slurm.address}:{port}")
        done = one.command("connect", "slurm", "--as-root", *words, *at)
        assert done.returncode == 0, done.stderr
    with two_planes(made):
        yield made


def test_leader_killed_with_one_job_running_one_in_slurms_queue_and_one_just_submitted(
    planes: TwoPlanes, slurm: SlurmLab, tmp_path: Path
) -> None:
    witness = Witness(tmp_path / "witness")
    with planes.client() as shoal:
        until(lambda: knows_both(shoal), "the leader has met the other", TAKEOVER_S)
        runs = submit(shoal, witness, nodes=2, cpus=1)
        until(lambda: len(witness.lines(runs.job_id, "start")) == 2, "both of its ranks run", TAKEOVER_S)
        for node in slurm.names:
            slurm.run(
                "sbatch", "--job-name=filler", f"--nodelist={node}", "-c3", "--wrap=sleep 600", "-o/dev/null"
            )
        waits = submit(shoal, witness, cpus=4)
        until(lambda: waits.refresh().data["attempts"][-1]["attempt_id"] in queued(slurm), "Slurm has it")
        fresh = submit(shoal, witness, cpus=1)
        planes.first.kill()
        planes.second.until_role("leader")
        seen = witness.count(runs.job_id, "beat", 1)
        slurm.run("scancel", "--quiet", "--name=filler")
        for job in (waits, fresh):
            until(lambda job=job: witness.lines(job.job_id, "start"), f"{job.ref} begins", TAKEOVER_S)  # type: ignore[misc]
        until(lambda: witness.count(runs.job_id, "beat", 1) > seen + SOME, "what ran runs on")
        for job in (runs, waits, fresh):
            witness.let_go(job)
        for job in (runs, waits, fresh):
            until(lambda job=job: job.refresh().status == "succeeded", f"{job.ref} ends well", TAKEOVER_S)  # type: ignore[misc]
            assert len(job.data["attempts"]) == 1
            assert witness.overlaps(job.job_id) == []


def submit(shoal: Shoal, witness: Witness, **resources: int) -> JobHandle:
    return shoal.submit(**witness.job(), workdir=None, resources=resources, ranks_per_node=1, grace="2s")


def knows_both(shoal: Shoal) -> bool:
    """What is submitted before they have met knows the leader alone, until it speaks to one of them."""
    job = shoal.submit(run="echo at $SHOAL_URL", workdir=None, resources={"cpus": 1}, ranks_per_node=1)
    until(lambda: job.refresh().status == "succeeded", f"{job.ref} ends well", TAKEOVER_S)
    told = until(lambda: [line["text"] for line in shoal.logs(job.job_id)], "its log comes back")
    return "," in told[0]


def queued(lab: SlurmLab) -> str:
    """Names of jobs that wait in Slurm's queue."""
    return lab.run("squeue", "-h", "-t", "PD", "-o", "%j")
