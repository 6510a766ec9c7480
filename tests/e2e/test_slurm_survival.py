"""`kill -9` of everything that a job on a real Slurm depends on: who survives what, counted by witnesses."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from shoal.client.handles import JobHandle
from tests.support import slurm_accounting
from tests.support.networks import PATH
from tests.support.real_plane import until
from tests.support.slurm_lab import Shape, SlurmLab, slurm_lab, what_is_missing
from tests.support.slurm_plane import SlurmPlane, is_running, parent_of, slurm_plane
from tests.support.witness import Witness

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(300)]
ONE, TWO = {"cpus": 1}, {"nodes": 2, "cpus": 1}
SOME = 10
"""Beats of a rank, two seconds: it goes on."""
LONG_S = 150.0


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    missing = what_is_missing() or slurm_accounting.what_is_missing(PATH)
    if missing is not None:
        pytest.skip(missing)
    shape = Shape(slurmd_timeout_s=300, has_accounting=True)
    with slurm_lab(tmp_path_factory.mktemp("slurm"), shape) as lab:
        yield lab


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory, lab: SlurmLab) -> Iterator[SlurmPlane]:
    with slurm_plane(tmp_path_factory.mktemp("slurm-plane") / "home", lab) as plane:
        yield plane


@pytest.fixture
def witness(plane: SlurmPlane) -> Witness:
    return plane.witness


def submitted(plane: SlurmPlane, witness: Witness, resources: dict[str, int]) -> JobHandle:
    retry = {"max": 3, "on": ["exit", "signal"]}
    return plane.submit(**witness.job(), resources=resources, grace="2s", retry=retry)


def begun(plane: SlurmPlane, witness: Witness, resources: dict[str, int]) -> JobHandle:
    """A job whose ranks all run."""
    job = submitted(plane, witness, resources)
    until_starts(witness, job, resources.get("nodes", 1))
    return plane.until_status(job, "running")


def until_starts(witness: Witness, job: JobHandle, count: int) -> None:
    told = f"{count} ranks of {job.ref} have begun"
    until(lambda: len(witness.lines(job.job_id, "start")) == count, told, within_s=LONG_S)


def goes_on(witness: Witness, job: JobHandle, rank: int = 0) -> None:
    seen = witness.count(job.job_id, "beat", rank)
    until(lambda: witness.count(job.job_id, "beat", rank) > seen + SOME, f"rank {rank} of {job.ref} goes on")


def ends_well(plane: SlurmPlane, witness: Witness, job: JobHandle, attempts: int = 1) -> None:
    """It succeeds, in so many attempts, and never ran beside itself."""
    witness.let_go(job)
    plane.until_status(job, "succeeded", "failed", "cancelled")
    told = plane.attempts(job)
    assert job.status == "succeeded", told
    assert len(told) == attempts, told
    assert witness.overlaps(job.job_id) == []


def test_slurmctld_killed_right_after_a_submission(
    plane: SlurmPlane, lab: SlurmLab, witness: Witness
) -> None:
    running = begun(plane, witness, TWO)
    # Slurm itself ends what it began and had not yet written down: it begins that again, beside itself.
    lab.until_saved()
    # All the rest of the cluster is somebody else's: what is submitted now waits in Slurm's queue.
    for node in lab.names:
        lab.run("sbatch", "--job-name=filler", f"--nodelist={node}", "--cpus-per-task=3", "--wrap=sleep 600")
    waits = submitted(plane, witness, {"cpus": 4})
    mine = plane.until_status(waits, "starting")
    name = f"shoal-{plane.attempt(mine)['attempt_id']}"
    until(lambda: name in lab.run("squeue", "-h", "-o", "%j"), "Slurm has accepted it")
    lab.kill_controller()
    goes_on(witness, running, 1)
    lab.start_controller()
    lab.run("scancel", "--quiet", "--name=filler")
    until_starts(witness, waits, 1)
    ends_well(plane, witness, waits)
    ends_well(plane, witness, running)


def test_slurmd_killed_and_started_again(plane: SlurmPlane, lab: SlurmLab, witness: Witness) -> None:
    job = begun(plane, witness, TWO)
    node = plane.attempt(job)["nodes"][1]
    lab.kill_slurmd(node)
    goes_on(witness, job, 1)
    lab.start_node(node)
    lab.until(lambda: node in lab.usable(), f"{node} takes jobs again")
    goes_on(witness, job, 1)
    ends_well(plane, witness, job)


def test_slurmdbd_killed_and_started_again(plane: SlurmPlane, lab: SlurmLab, witness: Witness) -> None:
    assert lab.accounting is not None
    before = begun(plane, witness, ONE)
    lab.accounting.kill()
    try:
        during = begun(plane, witness, ONE)
        ends_well(plane, witness, during)
    finally:
        lab.accounting.start()
    name = f"shoal-{plane.attempt(during)['attempt_id']}"
    until(lambda: name in lab.accounting.jobs(), "slurmdbd learns of what ran without it")  # type: ignore[union-attr]
    ends_well(plane, witness, before)


def test_control_plane_killed_with_jobs_running_waiting_and_just_submitted(
    plane: SlurmPlane, witness: Witness
) -> None:
    gang = begun(plane, witness, TWO)
    late = submitted(plane, witness, ONE)
    plane.kill()
    goes_on(witness, gang, 1)
    plane.up()
    until_starts(witness, late, 1)
    ends_well(plane, witness, gang)
    ends_well(plane, witness, late)


def test_supervisor_of_a_job_of_one_node_killed(plane: SlurmPlane, witness: Witness) -> None:
    job = begun(plane, witness, ONE)
    first = plane.attempt(job)
    os.kill(plane.supervisor(first, first["nodes"][0]), signal.SIGKILL)
    until_starts(witness, job, 2)
    ends_well(plane, witness, job, attempts=2)
    assert plane.attempts(job)[0]["reason"] == "lost"


def test_supervisor_of_one_node_of_two_killed(plane: SlurmPlane, witness: Witness) -> None:
    job = begun(plane, witness, TWO)
    first = plane.attempt(job)
    os.kill(plane.supervisor(first, first["nodes"][1]), signal.SIGKILL)
    until_starts(witness, job, 4)
    ends_well(plane, witness, job)
    assert plane.attempt(job)["generation"] == 1


def test_keeper_killed_alone(plane: SlurmPlane, witness: Witness) -> None:
    job = begun(plane, witness, ONE)
    first = plane.attempt(job)
    supervisor = plane.supervisor(first, first["nodes"][0])
    os.kill(parent_of(supervisor), signal.SIGKILL)
    until(lambda: not is_running(supervisor), "its supervisor does not outlive it")
    until_starts(witness, job, 2)
    ends_well(plane, witness, job, attempts=2)


def test_whole_node_killed_and_declared_dead(plane: SlurmPlane, lab: SlurmLab, witness: Witness) -> None:
    job = begun(plane, witness, ONE)
    node = plane.attempt(job)["nodes"][0]
    lab.crash_node(node)
    lab.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=crashed")
    try:
        until(lambda: not _is_alive(plane, node), f"{node} is not alive")
        assert len(witness.lines(job.job_id, "start")) == 1, "nothing is begun without evidence"
        done = plane.command("nodes", "declare-dead", node, "--because", "the test killed it")
        assert done.returncode == 0, done.stderr
        until_starts(witness, job, 2)
        ends_well(plane, witness, job, attempts=2)
    finally:
        lab.start_node(node)
        lab.until(lambda: node in lab.usable(), f"{node} takes jobs again")
        plane.command("nodes", "resume", node)


def _is_alive(plane: SlurmPlane, name: str) -> bool:
    told = json.loads(plane.command("nodes", "--json").stdout)
    return any(node["name"] == name and node["is_alive"] for node in told)
