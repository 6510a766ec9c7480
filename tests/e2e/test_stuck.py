"""A rank of a real job on this machine that does not die, whatever is done to it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.client.handles import JobHandle
from shoal.runtime import spool
from tests.support.deaf_disk import DeafDisk, deaf_disk, what_is_missing
from tests.support.owners_plane import reachable_folder
from tests.support.real_plane import RealPlane, a_plane, until
from tests.support.witness import STUCK_WAYS, Witness

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
    with a_plane(tmp_path / "home", "--mount-roots", str(witness.deaf.parent)) as real:
        yield real


@pytest.fixture
def disk(plane: RealPlane, witness: Witness) -> Iterator[DeafDisk]:
    with deaf_disk(witness.deaf) as made:
        yield made


def test_what_does_not_die_with_its_supervisor_is_not_replaced_until_it_is_gone(
    plane: RealPlane, witness: Witness, disk: DeafDisk
) -> None:
    jobs = [plane.submit(**witness.job(float("inf"), way), grace="1s") for way in STUCK_WAYS]
    are_stuck(disk, jobs)
    for job in jobs:
        [attempt] = plane.attempts(plane.until_status(job, "running"))
        claim = spool.read_claim(plane.share(attempt))
        assert claim is not None
        os.kill(claim.pid, signal.SIGKILL)
    are_told(plane, jobs)
    plane.kill()
    plane.up()  # who does not know that they were orphans finds it out again
    are_told(plane, jobs)
    for job in jobs:
        assert [one["state"] for one in plane.attempts(job)] == ["stopping"]
        assert len(witness.lines(job.job_id, "start", "overlap")) == 1
    disk.free()
    for job in jobs:
        witness.let_go(job)
        plane.until_status(job, "succeeded")
        assert [one["reason"] for one in plane.attempts(job)] == ["lost", "succeeded"]
        assert len(witness.lines(job.job_id, "start")) == 2
        assert witness.overlaps(job.job_id) == []


def test_a_stop_of_what_does_not_die_holds_its_place_until_it_is_gone(
    plane: RealPlane, witness: Witness, disk: DeafDisk
) -> None:
    jobs = [plane.submit(**witness.job(float("inf"), way), grace="1s") for way in STUCK_WAYS]
    are_stuck(disk, jobs)
    for job in jobs:
        plane.until_status(job, "running").stop()
    are_told(plane, jobs)  # once its supervisor, which waits for it without end, was killed
    for job in jobs:
        assert [one["state"] for one in plane.attempts(job)] == ["stopping"]
    disk.free()
    for job in jobs:
        plane.until_status(job, "cancelled")
        assert len(witness.lines(job.job_id, "start")) == 1


def are_stuck(disk: DeafDisk, jobs: list[JobHandle]) -> None:
    until(lambda: {f"{job.job_id}.0" for job in jobs} <= disk.asked.keys(), "their ranks are stuck")


def are_told(plane: RealPlane, jobs: list[JobHandle]) -> None:
    for job in jobs:
        until(lambda job=job: STUCK in json.dumps(plane.shoal.why(job.job_id)), f"it is known of {job.ref}")  # type: ignore[misc]
        assert STUCK in plane.command("why", job.ref).stdout
