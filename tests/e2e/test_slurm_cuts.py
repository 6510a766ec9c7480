"""Nodes of a real Slurm that are cut off: from the control plane, from their peers, from both, and healed.

Witness files on a disk that all nodes share show that no attempt runs beside itself or its successor, and
that what is healthy runs on. `python -m tests.soak.cuts` does the same at random.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.client.handles import JobHandle
from tests.support.real_plane import until
from tests.support.slurm_lab import Shape, SlurmLab, slurm_lab, what_is_missing
from tests.support.slurm_plane import SlurmPlane, slurm_plane
from tests.support.witness import Witness

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(600)]
ONE, TWO = {"cpus": 1}, {"nodes": 2, "cpus": 1}
FENCE_S = 60
"""The shortest that a job may have; the control plane waits as long again before it replaces anything."""
SOME = 10
"""Beats of a rank, two seconds: it goes on."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    missing = what_is_missing()
    if missing is not None:
        pytest.skip(missing)
    with slurm_lab(tmp_path_factory.mktemp("slurm"), Shape(slurmd_timeout_s=300)) as lab:
        yield lab


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory, lab: SlurmLab) -> Iterator[SlurmPlane]:
    with slurm_plane(tmp_path_factory.mktemp("slurm-plane") / "home", lab) as plane:
        yield plane


@pytest.fixture
def witness(plane: SlurmPlane) -> Witness:
    return plane.witness


@pytest.fixture(autouse=True)
def healed(lab: SlurmLab) -> Iterator[None]:
    yield
    for name in lab.names:
        lab.heal(name)


def begun(plane: SlurmPlane, witness: Witness, resources: dict[str, int], *options: str) -> JobHandle:
    """A job whose ranks all run."""
    job = plane.submit(
        **witness.job(float("inf"), *options),
        resources=resources,
        fence=f"{FENCE_S}s",
        grace="2s",
        retry={"max": 3, "on": ["exit", "signal"]},
    )
    num_ranks = resources.get("nodes", 1)
    told = f"the ranks of {job.ref} run"
    until(lambda: len(witness.lines(job.job_id, "start")) == num_ranks, told, within_s=150.0)
    return plane.until_status(job, "running")


def goes_on(witness: Witness, job: JobHandle, rank: int, what: str = "beat") -> None:
    seen = witness.count(job.job_id, what, rank)
    until(lambda: witness.count(job.job_id, what, rank) > seen + SOME, f"rank {rank} of {job.ref} goes on")


def ends_well(plane: SlurmPlane, witness: Witness, job: JobHandle, attempts: int = 1) -> None:
    """It succeeds, in so many attempts, and never ran beside itself."""
    witness.let_go(job)
    plane.until_status(job, "succeeded", "failed", "cancelled")
    told = plane.attempts(job)
    assert job.status == "succeeded", told
    assert len(told) == attempts, told
    assert witness.overlaps(job.job_id) == []


def is_called_silent(plane: SlurmPlane, job: JobHandle) -> bool:
    return "no sign of life" in plane.command("why", job.ref).stdout


def test_cut_from_the_control_plane_but_not_from_its_peers_a_node_works_on(
    plane: SlurmPlane, lab: SlurmLab, witness: Witness
) -> None:
    gang, other = begun(plane, witness, TWO, "--talk"), begun(plane, witness, ONE)
    cut = plane.attempt(gang)["nodes"][1]
    lab.cut(cut)
    until(lambda: is_called_silent(plane, gang), f"{cut} is called unreachable")
    assert plane.attempt(gang)["state"] == "running"
    goes_on(witness, gang, 1)
    goes_on(witness, gang, 1, "heard")
    lab.heal(cut)
    until(lambda: not is_called_silent(plane, gang), f"{cut} is heard again")
    ends_well(plane, witness, gang)
    ends_well(plane, witness, other)
    assert plane.attempt(gang)["generation"] == 0


def test_cut_from_its_peers_but_not_from_the_control_plane_nobody_is_killed(
    plane: SlurmPlane, lab: SlurmLab, witness: Witness
) -> None:
    gang = begun(plane, witness, TWO, "--talk")
    goes_on(witness, gang, 1, "heard")
    cut = plane.attempt(gang)["nodes"][1]
    lab.cut(cut, lab.others(cut), from_control=False)
    # What was on its way when the cut came has come by then.
    goes_on(witness, gang, 1)
    heard = witness.count(gang.job_id, "heard", 1)
    goes_on(witness, gang, 1)
    goes_on(witness, gang, 0)
    assert witness.count(gang.job_id, "heard", 1) == heard, "the cut lets nothing through"
    assert not is_called_silent(plane, gang)
    lab.heal(cut)
    goes_on(witness, gang, 1, "heard")
    ends_well(plane, witness, gang)
    assert plane.attempt(gang)["generation"] == 0
    assert witness.lines(gang.job_id, "deserted") == []


def test_cut_from_both_past_its_fence_a_node_has_stopped_before_its_successor_begins(
    plane: SlurmPlane, lab: SlurmLab, witness: Witness
) -> None:
    lost, other = begun(plane, witness, ONE), begun(plane, witness, TWO)
    first = plane.attempt(lost)
    cut = first["nodes"][0]
    is_struck = cut in plane.attempt(other)["nodes"]
    lab.cut(cut, lab.others(cut))
    goes_on(witness, lost, 0)
    until(
        lambda: len(witness.lines(lost.job_id, "start")) == 2,
        "a successor runs",
        within_s=2 * FENCE_S + 120.0,
    )
    second = plane.attempt(lost)
    assert cut not in second["nodes"]
    stopped = [line for line in witness.lines(lost.job_id, "stop") if line.attempt_id == first["attempt_id"]]
    assert len(stopped) == 1, "the supervisor that was cut off stopped its rank by its own clock"
    assert plane.attempts(lost)[0]["reason"] == "fenced"
    lab.heal(cut)
    goes_on(witness, lost, 0)
    ends_well(plane, witness, lost, attempts=2)
    if not is_struck:
        ends_well(plane, witness, other)
    witness.let_go(other)
    plane.until_status(other, "succeeded")
    assert witness.overlaps(other.job_id) == []
