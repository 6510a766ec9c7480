"""Shoal on a real Slurm: what it must stand on every cluster, and what only Slurm has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.cluster_cuts import PartitionContract
from tests.contract.cluster_drills import DrillContract
from tests.contract.cluster_listeners import ListenerContract
from tests.contract.cluster_survival import SurvivalContract
from tests.support import slurm_accounting
from tests.support.cluster_plane import ONE, TWO, ClusterPlane
from tests.support.networks import PATH
from tests.support.real_plane import until
from tests.support.slurm_lab import Shape, SlurmLab, slurm_lab, what_is_missing

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("cleared"),
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    missing = what_is_missing() or slurm_accounting.what_is_missing(PATH)
    if missing is not None:
        pytest.skip(missing)
    shape = Shape(slurmd_timeout_s=300, has_accounting=True)
    with slurm_lab(tmp_path_factory.mktemp("slurm"), shape) as lab:
        yield lab


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory, lab: SlurmLab) -> Iterator[ClusterPlane]:
    real = ClusterPlane(tmp_path_factory.mktemp("slurm-plane") / "home", lab, "--serve-on", "127.0.0.1:0")
    told = real.connect()
    assert (told["nodes"], told["alive"], told["nodes_on"]) == (3, 3, f"{lab.address}:7464")
    real.up()
    try:
        yield real
    finally:
        real.down()


class TestDrills(DrillContract):
    pass


class TestListeners(ListenerContract):
    pass


class TestSurvival(SurvivalContract):
    pass


class TestCuts(PartitionContract):
    pass


@pytest.fixture
def full(lab: SlurmLab) -> Iterator[None]:
    """All that is free of the cluster is somebody else's: what is submitted waits in Slurm's queue."""
    for node in lab.names:
        lab.run(
            "sbatch",
            "--job-name=filler",
            f"--nodelist={node}",
            "--cpus-per-task=3",
            "--output=/dev/null",
            "--wrap=sleep 600",
        )
    yield
    lab.run("scancel", "--quiet", "--name=filler")


class TestSlurm:
    def test_what_waits_in_slurms_queue_is_explained_in_its_words(
        self, plane: ClusterPlane, lab: SlurmLab, full: None
    ) -> None:
        job = plane.submit("true", resources={"cpus": 2})
        until(lambda: "is PENDING (" in plane.command("why", job.ref).stdout, "why quotes Slurm")
        lab.run("scancel", "--name=filler")
        plane.until_status(job, "succeeded")

    def test_slurmctld_killed_right_after_a_submission(
        self, plane: ClusterPlane, lab: SlurmLab, request: pytest.FixtureRequest
    ) -> None:
        running = plane.begun(TWO)
        # Slurm itself ends what it began and had not yet written down: it begins that again, beside itself.
        lab.until_saved()
        request.getfixturevalue("full")
        waits = plane.submitted({"cpus": 2})
        mine = plane.until_status(waits, "starting")
        name = f"shoal-{plane.attempt(mine)['attempt_id']}"
        until(lambda: name in lab.run("squeue", "-h", "-o", "%j"), "Slurm has accepted it")
        lab.kill_controller()
        plane.goes_on(running, 1)
        lab.start_controller()
        lab.run("scancel", "--quiet", "--name=filler")
        plane.until_starts(waits, 1)
        plane.ends_well(waits)
        plane.ends_well(running)

    def test_slurmdbd_killed_and_started_again(self, plane: ClusterPlane, lab: SlurmLab) -> None:
        assert lab.accounting is not None
        before = plane.begun(ONE)
        lab.accounting.kill()
        try:
            during = plane.begun(ONE)
            plane.ends_well(during)
        finally:
            lab.accounting.start()
        name = f"shoal-{plane.attempt(during)['attempt_id']}"
        until(lambda: name in lab.accounting.jobs(), "slurmdbd learns of what ran without it")  # type: ignore[union-attr]
        plane.ends_well(before)
