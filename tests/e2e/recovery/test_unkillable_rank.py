"""A rank of a real job on this machine that cannot be killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.client.handles import JobHandle
from shoal.runtime.files import spool
from tests.support.faults.hung_disk import HungDisk, hung_disk, what_is_missing
from tests.support.faults.witness import STUCK_OPTIONS, Witness
from tests.support.planes.real import RealPlane, running_plane, until
from tests.support.slurm.owners_plane import reachable_folder

STUCK = "is dead or silent, and what it left may still run"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(what_is_missing() is not None, reason=str(what_is_missing())),
]


@pytest.fixture
def witness() -> Iterator[Witness]:
    with reachable_folder() as folder:  # jobs are users of their own
        (folder / "witness").mkdir()
        (folder / "witness").chmod(0o777)
        yield Witness(folder / "witness")


@pytest.fixture
def plane(tmp_path: Path, witness: Witness) -> Iterator[RealPlane]:
    with running_plane(tmp_path / "home", "--mount-roots", str(witness.hung_dir.parent)) as real:
        yield real


@pytest.fixture
def disk(plane: RealPlane, witness: Witness) -> Iterator[HungDisk]:
    with hung_disk(witness.hung_dir) as folder:
        yield folder


def test_task_with_unkillable_processes_is_not_replaced_until_they_are_gone(
    plane: RealPlane, witness: Witness, disk: HungDisk
) -> None:
    jobs = [plane.submit(**witness.job_fields(float("inf"), way), grace="1s") for way in STUCK_OPTIONS]
    are_stuck(disk, jobs)
    for job in jobs:
        [attempt] = plane.attempts(plane.until_status(job, "running"))
        claim = spool.read_claim(plane.spool_task(attempt))
        assert claim is not None
        os.kill(claim.pid, signal.SIGKILL)
    are_told(plane, jobs)
    plane.kill()
    plane.up()  # a control plane that does not know of orphans finds them again
    are_told(plane, jobs)
    for job in jobs:
        assert [record["state"] for record in plane.attempts(job)] == ["stopping"]
        assert len(witness.lines(job.job_id, "start", "overlap")) == 1
    disk.release()
    for job in jobs:
        witness.release(job)
        plane.until_status(job, "succeeded")
        assert [record["reason"] for record in plane.attempts(job)] == ["lost", "succeeded"]
        assert len(witness.lines(job.job_id, "start")) == 2
        assert witness.overlaps(job.job_id) == []


def test_stopped_job_holds_its_place_until_unkillable_processes_are_gone(
    plane: RealPlane, witness: Witness, disk: HungDisk
) -> None:
    jobs = [plane.submit(**witness.job_fields(float("inf"), way), grace="1s") for way in STUCK_OPTIONS]
    are_stuck(disk, jobs)
    for job in jobs:
        plane.until_status(job, "running").stop()
    are_told(plane, jobs)  # once its supervisor, which would wait without end, was killed
    for job in jobs:
        assert [record["state"] for record in plane.attempts(job)] == ["stopping"]
    disk.release()
    for job in jobs:
        plane.until_status(job, "cancelled")
        assert len(witness.lines(job.job_id, "start")) == 1


def are_stuck(disk: HungDisk, jobs: list[JobHandle]) -> None:
    until(lambda: {f"{job.job_id}.0" for job in jobs} <= disk.stuck_threads.keys(), "their ranks are stuck")


def are_told(plane: RealPlane, jobs: list[JobHandle]) -> None:
    for job in jobs:
        until(lambda job=job: STUCK in json.dumps(plane.shoal.why(job.job_id)), f"it is known of {job.ref}")  # type: ignore[misc]
        assert STUCK in plane.command("why", job.ref).stdout
