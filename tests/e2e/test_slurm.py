"""A person on a Slurm that is not theirs: connect, up, and the same job file and commands as on a laptop."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator

import pytest

from shoal.client.handles import JobHandle
from tests.e2e.test_drills import PROGRAM
from tests.support.real_plane import until
from tests.support.shares import SOURCE
from tests.support.slurm_lab import SlurmLab, slurm_lab, what_is_missing
from tests.support.slurm_plane import SlurmPlane

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed: pip install 'shoal[train]'"
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    missing = what_is_missing()
    if missing is not None:
        pytest.skip(missing)
    with slurm_lab(tmp_path_factory.mktemp("slurm")) as lab:
        yield lab


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory, lab: SlurmLab) -> Iterator[SlurmPlane]:
    real = SlurmPlane(tmp_path_factory.mktemp("slurm-plane") / "home", lab)
    told = real.connect()
    assert (told["nodes"], told["alive"], told["nodes_on"]) == (3, 3, f"{lab.address}:7464")
    real.up()
    try:
        yield real
    finally:
        real.down()


def log_of(plane: SlurmPlane, job: JobHandle) -> list[str]:
    return [line["text"] for line in plane.shoal.logs(job.job_id)]


def test_a_job_runs_on_a_node_of_slurm_and_its_log_comes_back(plane: SlurmPlane) -> None:
    job = plane.submit("echo from $(hostname); exit 3", resources={"cpus": 1})
    plane.until_status(job, "failed")
    # Its keeper hands the last lines in after its supervisor has told the end.
    until(lambda: any(line.startswith("from n") for line in log_of(plane, job)), "its log comes back")
    assert plane.attempts(job)[-1]["exit_code"] == 3


def test_what_waits_in_slurms_queue_is_explained_in_its_words(plane: SlurmPlane, lab: SlurmLab) -> None:
    for node in lab.names:
        lab.run(
            "sbatch",
            "--job-name=filler",
            f"--nodelist={node}",
            "--exclusive",
            "--wrap=sleep 600",
            "-o/dev/null",
        )
    lab.until(lambda: len(lab.run("squeue", "-h", "-t", "R").splitlines()) == 3, "the fillers run")
    job = plane.submit("true", resources={"cpus": 1})
    until(lambda: "is PENDING (" in plane.command("why", job.ref).stdout, "why quotes Slurm")
    lab.run("scancel", "--name=filler")
    plane.until_status(job, "succeeded")


def test_a_killed_control_plane_finds_everything_again(plane: SlurmPlane) -> None:
    job = plane.submit("echo begun; sleep 4; echo done", resources={"cpus": 1})
    plane.until_status(job, "running")
    plane.kill()
    plane.up()
    plane.until_status(job, "succeeded")
    until(lambda: log_of(plane, job) == ["begun", "done"], "its log comes back whole")
    assert len(plane.attempts(job)) == 1


@needs_torch
def test_training_on_two_nodes_goes_on_after_a_lost_node(plane: SlurmPlane) -> None:
    job = _train(plane)
    kept = plane.shared / "checkpoints" / job.job_id
    until(lambda: len(list(kept.glob("step-*"))) >= 2, "two checkpoints are there", within_s=120.0)
    done = plane.command("drill", "kill-node", job.ref, "--window", "2s", "--json")
    assert done.returncode == 0, (done.stdout, done.stderr)
    told = json.loads(done.stdout)["result"]
    assert (told["outcome"], told["new_attempts"]) == ("recovered", 0)
    print(f"kill-node on Slurm: next step after {told['stepped_s']:.1f} s, {told['steps_lost']} steps lost")
    job.stop()
    plane.until_status(job, "cancelled")


def _train(plane: SlurmPlane) -> JobHandle:
    job = plane.shoal.submit(
        name="train",
        setup=f"cat > train.py <<'END'\n{PROGRAM}\nEND",
        run="python train.py",
        workdir=None,
        resources={"nodes": 2, "gpus": 2},  # all that a node has: another job of Slurm's would wait for it
        ranks_per_node=1,
        checkpoint={},
        retry={"max": 30},
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE, "CUDA_VISIBLE_DEVICES": ""},
    )
    return plane.until_status(job, "running")
