"""Shoal on a real Slurm of several partitions: every job goes to one that has its nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from shoal.client.handles import JobHandle
from tests.support.planes.cluster_plane import ClusterPlane, cluster_plane
from tests.support.planes.real import until
from tests.support.slurm.owners_plane import slurm_name
from tests.support.slurm.real_slurm import SlurmLab, SlurmShape, slurm_lab, what_is_missing

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(300)]
SHAPE = SlurmShape(
    partitions=(
        "main Nodes=n0 Default=YES MaxTime=INFINITE State=UP",
        "wide Nodes=n[1-2] DefaultTime=10 MaxTime=60 State=UP",
        "twin Nodes=n[1-2] PriorityTier=0 MaxTime=INFINITE State=UP",
        "closed Nodes=ALL RootOnly=YES Hidden=YES State=UP",
    ),
    switches=("leaf0 Nodes=n0", "leaf1 Nodes=n[1-2]", "top Switches=leaf[0-1]"),
)
EXPECTED = re.compile(r"is PENDING \(\w+\), Slurm expects it to start at 20[0-9-]+T[0-9:]+ UTC")


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


def went_to(plane: ClusterPlane, lab: SlurmLab, job: JobHandle) -> str:
    """The partition of a job that has run, as Slurm lists it."""
    plane.until_status(job, "succeeded", "failed")
    assert job.status == "succeeded", plane.command("why", job.ref).stdout
    name = f"--name={slurm_name(job, plane.attempt(job)['attempt_id'])}"
    return lab.run("squeue", "--noheader", "--states=all", "--format=%P", name).strip()


def test_jobs_go_to_a_partition_that_has_their_nodes(plane: ClusterPlane, lab: SlurmLab) -> None:
    # Each takes a node whole: two of them fit only outside of Slurm's default partition.
    jobs = [plane.submit_witness({"cpus": 4}) for _ in range(3)]
    for job in jobs:
        plane.until_starts(job, 1)
    for job in jobs:
        plane.witness.release(job)
    assert sorted(went_to(plane, lab, job) for job in jobs) == ["main", "wide", "wide"]


def test_a_gang_is_in_one_partition_without_a_word_about_it(plane: ClusterPlane, lab: SlurmLab) -> None:
    assert went_to(plane, lab, plane.submit("true", resources={"nodes": 2})) == "wide"


def test_who_names_a_partition_gets_it(plane: ClusterPlane, lab: SlurmLab) -> None:
    for resources, partition in (
        ({"nodes": 2, "require": {"partition.twin": "yes"}}, "twin"),
        ({"require": {"pool": "main"}}, "main"),
    ):
        assert went_to(plane, lab, plane.submit("true", resources=resources)) == partition


def test_a_job_longer_than_one_partition_has_goes_to_another(plane: ClusterPlane, lab: SlurmLab) -> None:
    job = plane.submit("true", resources={"require": {"rack": "leaf1"}}, time_limit="2h")
    assert went_to(plane, lab, job) == "twin"


def test_a_gang_that_no_partition_holds_is_refused_in_words(plane: ClusterPlane) -> None:
    refused = plane.command("run", "--nodes", "3", "--", "true")
    assert refused.returncode == 2
    assert "asks for 3 nodes with 1 CPU in one `pool`; the largest has 2" in refused.stderr
    # One that says itself how close its nodes are keeps what it says.
    job = plane.submit("true", resources={"nodes": 3}, topology="fabric")
    plane.until_status(job, "failed")
    said = " ".join(plane.command("why", job.ref).stdout.split())
    for told in ("no one partition holds", "n0 in main", "n1 in wide, twin", "n2 in wide, twin"):
        assert told in said


def test_what_waits_quotes_slurms_reason_and_its_estimate(plane: ClusterPlane, lab: SlurmLab) -> None:
    words = ("--job-name=filler", "--nodelist=n0", "--cpus-per-task=4", "--time=5", "--output=/dev/null")
    lab.run("sbatch", *words, "--wrap=sleep 600")
    job = plane.submit("true", resources={"cpus": 2, "require": {"pool": "main"}})
    until(lambda: EXPECTED.search(" ".join(plane.command("why", job.ref).stdout.split())), "why quotes both")
    lab.run("scancel", "--name=filler")
    plane.until_status(job, "succeeded")


@pytest.fixture
def busy(lab: SlurmLab) -> Iterator[str]:
    """A node that somebody else has most of."""
    words = ("--job-name=filler", "--partition=wide", "--nodelist=n1", "--cpus-per-task=3")
    lab.run("sbatch", *words, "--output=/dev/null", "--wrap=sleep 600")
    yield "n1"
    lab.cancel("filler")


def test_a_node_that_others_work_on_comes_after_those_that_nobody_does(
    plane: ClusterPlane, lab: SlurmLab, busy: str
) -> None:
    def states() -> dict[str, str]:
        lines = plane.command("nodes").stdout.splitlines()[1:]
        return {line.split()[0]: line.split()[2] for line in lines}

    until(
        lambda: states() == {"n0": "ready", busy: "busy", "n2": "ready"}, "Slurm has said twice that it is so"
    )
    went = []
    for resources in ({"cpus": 3}, {"cpus": 3}, {"nodes": 2}):
        job = plane.submit("true", resources={**resources, "require": {"rack": "leaf1"}})
        plane.until_status(job, "succeeded")
        went.append(plane.attempt(job)["nodes"])
    assert went == [["n2"], ["n2"], ["n2", busy]]
    lab.cancel("filler")
    until(lambda: set(states().values()) == {"ready"}, "and that nobody is there")


def test_what_is_left_out_is_told_and_why(plane: ClusterPlane, lab: SlurmLab) -> None:
    said = " ".join(plane.command("doctor").stdout.split())
    assert "jobs may go to main, wide, twin; partition `closed` is left out: hidden" in said
    lab.run("scontrol", "update", "PartitionName=main", "State=DOWN")
    try:
        until(lambda: "n0" not in plane.nodes_alive(), "the node of a closed partition takes no work")
        assert "partition `main` is DOWN" in " ".join(plane.command("doctor").stdout.split())
    finally:
        lab.run("scontrol", "update", "PartitionName=main", "State=UP")
