"""The health check beside a real Slurm, in which users choose names: which jobs go on at a node it knows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fakes.machines import NodeHealth
from tests.support.slurm.real_slurm import SlurmLab

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(300)]
NODE, OTHER = "n0", "n1"
FEIGNED = "x JobState=RUNNING y"
MINE = ("sbatch", "--parsable", f"--job-name={FEIGNED}", "--output=/dev/null")
SLEEP = "--wrap=exec sleep 600"


@pytest.fixture(autouse=True)
def cleared(slurm: SlurmLab) -> Iterator[None]:
    yield
    slurm.reset()


@pytest.fixture
def health(tmp_path: Path) -> NodeHealth:
    return NodeHealth(tmp_path, NODE)


def submitted(slurm: SlurmLab, *words: str) -> str:
    """A job at the node, as it is known to Slurm once it runs."""
    job = slurm.run(*MINE, f"--nodelist={NODE}", *words, SLEEP).strip()
    slurm.until(lambda: "PENDING" not in state(slurm, job), "the job runs")
    return job


def state(slurm: SlurmLab, job: str) -> str:
    return slurm.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%A %T %N")


def reason(slurm: SlurmLab, health: NodeHealth, *jobs: str) -> str:
    """Why the node is drained once the check has looked at processes of these jobs; nothing: it is not."""
    for pid, job in enumerate(jobs, start=10):
        health.add_thread(pid, pid, f"/slurm_{NODE}/uid_0/job_{job}/step_batch")
    slurm.run("scontrol", "update", f"nodename={NODE}", "state=drain", "reason=shoal: / is 99% full")
    health.run(slurm.environment)
    told = slurm.run("sinfo", "-h", "-N", "-n", NODE, "-o", "%T|%E").splitlines()[0]
    return told.partition("|")[2] if "drain" in told else ""


def over(job: str) -> str:
    return f"shoal: Kill task failed: job {job} is over, and something of it lives"


def test_what_users_write_hides_no_job_that_is_over(slurm: SlurmLab, health: NodeHealth) -> None:
    job = submitted(slurm)
    assert reason(slurm, health, job) == ""
    slurm.run("scancel", job)
    slurm.until(lambda: "CANCELLED" in state(slurm, job), "the job is over")
    assert FEIGNED in slurm.run("scontrol", "-o", "show", "job", job)
    assert reason(slurm, health, job) == over(job)


def test_an_element_that_is_over_is_not_hidden_by_the_array_whose_number_it_has(
    slurm: SlurmLab, health: NodeHealth
) -> None:
    array = submitted(slurm, "--array=0-1")
    assert reason(slurm, health, array) == ""
    # The last of an array that begins keeps the number of the whole.
    slurm.run("scancel", f"{array}_1")
    slurm.until(lambda: f"{array} CANCELLED" in state(slurm, array), "the element is over")
    assert "RUNNING" in state(slurm, array)
    assert reason(slurm, health, array) == over(array)


def test_a_job_that_was_queued_again_and_runs_elsewhere_is_over_here(
    slurm: SlurmLab, health: NodeHealth
) -> None:
    job = submitted(slurm, "--requeue")
    slurm.run("scontrol", "requeuehold", job)
    slurm.until(lambda: "COMPLETING" not in state(slurm, job), "the job has left the node")
    slurm.run("scontrol", "update", f"jobid={job}", f"reqnodelist={OTHER}", "starttime=now")
    slurm.run("scontrol", "release", job)
    slurm.until(lambda: f"{job} RUNNING {OTHER}" in state(slurm, job), "the job runs elsewhere")
    assert reason(slurm, health, job) == over(job)


def test_a_job_that_slurm_does_not_know_is_over(slurm: SlurmLab, health: NodeHealth) -> None:
    assert reason(slurm, health) == ""
    assert reason(slurm, health, "99999999") == over("99999999")
