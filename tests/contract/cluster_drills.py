"""What a person does on a cluster that is not theirs, the same on every one: run, lose something, go on."""

from __future__ import annotations

import importlib.util
import json

import pytest

from shoal.client.handles import JobHandle
from tests.e2e.test_drills import PROGRAM
from tests.support.cluster_plane import ClusterPlane
from tests.support.real_plane import until
from tests.support.shares import SOURCE

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed: pip install 'shoal[train]'"
)


class DrillContract:
    def test_a_job_runs_on_a_node_and_its_log_comes_back(self, plane: ClusterPlane) -> None:
        said = "echo from $(hostname), $(env | grep -c ^RAY_) of Ray; exit 3"
        job = plane.submit(said, resources={"cpus": 1})
        plane.until_status(job, "failed")
        # Its keeper hands the last lines in after its supervisor has told the end.
        until(lambda: any(line.startswith("from n") for line in plane.log_of(job)), "its log comes back")
        assert plane.attempts(job)[-1]["exit_code"] == 3
        assert plane.log_of(job)[0].endswith(", 0 of Ray"), "nothing that Ray set reaches a job"

    @needs_torch
    def test_training_on_two_nodes_goes_on_after_a_lost_node(self, plane: ClusterPlane) -> None:
        job = _train(plane)
        kept = plane.shared / "checkpoints" / job.job_id
        until(lambda: len(list(kept.glob("step-*"))) >= 2, "two checkpoints are there", within_s=120.0)
        done = plane.command("drill", "kill-node", job.ref, "--window", "2s", "--json", timeout_s=240.0)
        assert done.returncode == 0, (done.stdout, done.stderr)
        told = json.loads(done.stdout)["result"]
        assert (told["outcome"], told["new_attempts"]) == ("recovered", 0)
        step, lost = told["stepped_s"], told["steps_lost"]
        print(f"kill-node on {plane.lab.engine}: next step after {step:.1f} s, {lost} steps lost")
        job.stop()
        plane.until_status(job, "cancelled")


def _train(plane: ClusterPlane) -> JobHandle:
    job = plane.shoal.submit(
        name="train",
        setup=f"cat > train.py <<'END'\n{PROGRAM}\nEND",
        run="python train.py",
        workdir=None,
        # All GPUs that a node has: another job of Slurm's would wait for it.
        resources={"nodes": 2, "gpus": 2, "cpus": 2},
        ranks_per_node=1,
        checkpoint={},
        retry={"max": 30},
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE, "CUDA_VISIBLE_DEVICES": ""},
    )
    return plane.until_status(job, "running")
