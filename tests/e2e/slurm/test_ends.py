"""A Slurm that ends healthy jobs by rules of its own, a partition's time limit and preemption: they go on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.client.handles import JobHandle
from tests.support.planes.cluster_plane import ClusterPlane, cluster_plane
from tests.support.planes.real import until
from tests.support.slurm.owners_plane import slurm_name
from tests.support.slurm.real_slurm import SlurmLab, SlurmShape, slurm_lab, what_is_missing

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(400)]
SHAPE = SlurmShape(
    nodes=2,
    partitions=(
        "main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE State=UP",
        "short Nodes=ALL MaxTime=1 PriorityTier=1 PreemptMode=CANCEL State=UP",
        "urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF Hidden=YES State=UP",
    ),
    settings=("PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE", "OverTimeLimit=0"),
)
COUNTS = """
at=$SHOAL_CHECKPOINT_DIR/steps
step=$(cat $at 2>/dev/null || echo 0)
echo "from $([ $step -gt 0 ] && echo a checkpoint || echo the beginning)"
while [ ! -e $SHOAL_CHECKPOINT_DIR/enough ]; do
    step=$((step + 1)); echo $step > $at.new; mv $at.new $at; sleep 0.2
done
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    missing = what_is_missing()
    if missing is not None:
        pytest.skip(missing)
    with slurm_lab(tmp_path_factory.mktemp("slurm"), SHAPE) as lab:
        yield lab


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory, lab: SlurmLab) -> Iterator[ClusterPlane]:
    with cluster_plane(tmp_path_factory.mktemp("slurm-plane") / "home", lab) as plane:
        yield plane


def counting(plane: ClusterPlane, partition: str) -> JobHandle:
    """A job that saves its steps, and has no retry."""
    resources = {"cpus": 2, "require": {f"partition.{partition}": "yes"}}
    job = plane.submit(COUNTS, resources=resources, checkpoint={}, grace="2s", retry={"max": 0})
    plane.until_status(job, "running")
    until((plane.shared / "checkpoints" / job.job_id / "steps").exists, "it has saved")
    return job


def is_ended_by_slurm(plane: ClusterPlane, lab: SlurmLab, job: JobHandle, word: str, within_s: float) -> None:
    """Slurm ends it, with that word: its attempt is lost, and a second one is there."""
    until(lambda: len(plane.attempts(job)) == 2, f"Slurm has ended {job.ref}", within_s=within_s)
    lost = plane.attempts(job)[0]
    asked = ("--noheader", "--states=all", "--format=%T", f"--name={slurm_name(job, lost['attempt_id'])}")
    until(lambda: lab.run("squeue", *asked).strip() == word, f"Slurm calls it {word}", within_s=60.0)
    assert (lost["state"], lost["reason"]) == ("ended", "lost"), lost


def goes_on(plane: ClusterPlane, job: JobHandle) -> None:
    """The second attempt takes up the checkpoint of the first, and the job ends well."""
    until(lambda: plane.log_of(job) == ["from a checkpoint"], "the next attempt goes on", within_s=90.0)
    (plane.shared / "checkpoints" / job.job_id / "enough").touch()
    plane.until_status(job, "succeeded", "failed")
    assert (job.status, len(plane.attempts(job))) == ("succeeded", 2), plane.attempts(job)


@pytest.mark.parametrize("partition", ["main", "short"])
def test_a_job_that_slurm_preempts_goes_on_elsewhere_and_has_lost_no_retry(
    plane: ClusterPlane, lab: SlurmLab, partition: str
) -> None:
    job = counting(plane, partition)
    [node] = plane.attempt(job)["nodes"]
    words = ("--job-name=filler", f"--nodelist={node}", "--exclusive", "--time=5", "--output=/dev/null")
    lab.run("sbatch", "--partition=urgent", *words, "--wrap=sleep 600")
    try:
        is_ended_by_slurm(plane, lab, job, "PREEMPTED", within_s=90.0)
        goes_on(plane, job)
    finally:
        lab.run("scancel", "--name=filler")
    assert plane.attempt(job)["nodes"] != [node]


def test_a_job_whose_limit_is_its_partitions_ends_with_it_and_does_not_begin_anew(
    plane: ClusterPlane,
) -> None:
    resources = {"cpus": 1, "require": {"partition.short": "yes"}}
    job = plane.submit("sleep 600", resources=resources, grace="2s", time_limit="1m")
    until(lambda: job.refresh().status == "failed", f"{job.ref} is over", within_s=90.0)
    [only] = plane.attempts(job)
    assert only["reason"] == "time_limit", only


@pytest.mark.soak
def test_a_job_that_slurm_ends_at_its_partitions_time_limit_goes_on_and_has_lost_no_retry(
    plane: ClusterPlane, lab: SlurmLab
) -> None:
    job = counting(plane, "short")
    is_ended_by_slurm(plane, lab, job, "TIMEOUT", within_s=150.0)
    goes_on(plane, job)
