"""A slurmd that is away for longer than its SlurmdTimeout, which is five seconds here, or half an hour."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.client.handles import JobHandle
from shoal.engines.remote.task_observer import SILENT_S
from tests.contract.cluster.survival import declare_dead
from tests.support.faults.witness import since_boot
from tests.support.planes.cluster_plane import ONE_NODE, TWO_NODES, ClusterPlane, cluster_plane
from tests.support.planes.real import until
from tests.support.slurm.owners_plane import reachable_folder, slurm_name
from tests.support.slurm.real_slurm import SlurmLab, SlurmShape, slurm_lab, what_is_missing

pytestmark = [pytest.mark.engines, pytest.mark.soak, pytest.mark.timeout(400)]


AS_WE_MAKE_IT = SlurmShape(nodes=2, slurmd_timeout_s=1800)
"""As patient as a Slurm that `shoal cluster create` has made."""


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[SlurmLab]:
    missing = what_is_missing()
    if missing is not None:
        pytest.skip(missing)
    shape = getattr(request, "param", SlurmShape(nodes=2))
    with reachable_folder() as folder, slurm_lab(folder / "slurm", shape) as lab:
        yield lab


@pytest.fixture
def plane(lab: SlurmLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterPlane]:
    with cluster_plane(tmp_path_factory.mktemp("plane") / "home", lab) as plane:
        yield plane


def waiting_for(plane: ClusterPlane, lab: SlurmLab, node: str) -> JobHandle:
    """A job that waits in Slurm's queue for that node."""
    lab.fill(node)
    with plane.only_node(node):
        waits = plane.until_status(plane.submit_witness({"cpus": 2}), "starting")
    plane.until_explained(waits, "is PENDING (")
    return waits


def went_elsewhere(plane: ClusterPlane, job: JobHandle) -> None:
    lost, ran = plane.attempts(job)
    assert (lost["reason"], lost["nodes"] == ran["nodes"]) == ("lost", False)


def test_what_runs_there_runs_on_until_the_slurmd_is_back_and_what_waits_goes_elsewhere(
    plane: ClusterPlane, lab: SlurmLab
) -> None:
    runs = plane.start_witness(ONE_NODE)
    [node] = plane.attempt(runs)["nodes"]
    waits = waiting_for(plane, lab, node)
    lab.kill_daemon(node)
    killed_at = since_boot()
    plane.until_starts(waits, 1)
    elsewhere_s = plane.witness.lines(waits.job_id, "start")[0].at - killed_at
    print(f"what waited for a node whose slurmd is dead began elsewhere after {elsewhere_s:.1f} s")
    went_elsewhere(plane, waits)
    name = slurm_name(runs, plane.attempt(runs)["attempt_id"])
    listed = ("squeue", "-h", "-t", "all", "-n", name, "-o", "%T")
    until(lambda: lab.run(*listed) == "NODE_FAIL\n", "Slurm believes that it failed")
    plane.wait_for_progress(runs)
    assert len(plane.attempts(runs)) == 1, "which ends nothing"
    lab.start_node(node)
    back_at = since_boot()
    plane.until_starts(runs, 2)
    again_s = plane.witness.lines(runs.job_id, "start")[1].at - back_at
    print(f"a new attempt began {again_s:.1f} s after the slurmd was back")
    ended = plane.attempts(runs)[0]
    assert (ended["reason"], "SIGTERM came to its node agent" in ended["message"]) == ("lost", True)
    plane.finish(runs, attempts=2)
    plane.finish(waits, attempts=2)


def test_what_waits_for_a_node_that_has_crashed_goes_elsewhere(plane: ClusterPlane, lab: SlurmLab) -> None:
    waits = waiting_for(plane, lab, "n0")
    lab.crash_node("n0")
    plane.until_starts(waits, 1)
    went_elsewhere(plane, waits)
    lab.start_node("n0")
    plane.finish(waits, attempts=2)


@pytest.mark.parametrize("lab", [AS_WE_MAKE_IT], indirect=True)
def test_what_is_given_to_a_node_that_has_just_died_goes_elsewhere(
    plane: ClusterPlane, lab: SlurmLab
) -> None:
    """Slurm says that it runs there, and would for half an hour."""
    lab.crash_node("n0")
    crashed_at = since_boot()
    with plane.only_node("n0"):
        given = plane.until_status(plane.submit_witness(ONE_NODE), "starting")
        assert plane.attempt(given)["nodes"] == ["n0"]
    until(lambda: "NOT_RESPONDING" in lab.run("scontrol", "show", "node", "n0", "-o"), "Slurm has noticed")
    plane.until_starts(given, 1, within_s=3 * SILENT_S)
    elsewhere_s = plane.witness.lines(given.job_id, "start")[0].at - crashed_at
    print(f"what was given to a dead node began elsewhere after {elsewhere_s:.1f} s")
    went_elsewhere(plane, given)
    assert "has not answered Slurm for" in plane.attempts(given)[0]["message"]
    assert "DOWN" not in lab.run("scontrol", "show", "node", "n0", "-o")
    lab.start_node("n0")
    plane.finish(given, attempts=2)


@pytest.mark.parametrize("lab", [SlurmShape(nodes=3, slurmd_timeout_s=1800)], indirect=True)
def test_a_gang_that_lost_a_machine_and_went_on_leaves_nothing_at_slurm(
    plane: ClusterPlane, lab: SlurmLab
) -> None:
    """Slurm counts on the machine for half an hour, and would wait for it as long."""
    gang = plane.start_witness(TWO_NODES)
    first, lost = plane.attempt(gang)["nodes"]
    lab.crash_node(lost)
    until(lambda: lost not in plane.nodes_alive(), f"{lost} is not alive", within_s=120.0)
    declare_dead(plane, lost)
    until(lambda: lost not in plane.attempt(gang)["nodes"], "another node has its place", within_s=120.0)
    plane.until_status(gang, "running")
    plane.wait_for_progress(gang, 1)
    plane.finish(gang)
    left = ("squeue", "-h", "-t", "R", "-w", first)
    until(lambda: not lab.run(*left), f"Slurm has nothing running on {first}")
    lab.start_node(lost)
