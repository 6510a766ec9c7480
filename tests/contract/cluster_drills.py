"""What a person does on a cluster that is not theirs, the same on every one: run, lose something, go on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.contract.cluster_cuts import CutOff
from tests.contract.cluster_same_file import SameFileContract
from tests.support.cluster_plane import ClusterPlane
from tests.support.real_plane import until


class DrillContract(SameFileContract):
    @pytest.fixture(scope="class")
    @classmethod
    def is_calm(cls, plane: ClusterPlane, cut_off: CutOff) -> Callable[[], bool]:
        """Whether the node that was cut off is known to be silent, or its job was begun again elsewhere."""
        return lambda: plane.is_called_silent(cut_off.job) or len(plane.attempts(cut_off.job)) > 1

    def test_a_job_runs_on_a_node_and_its_log_comes_back(self, plane: ClusterPlane) -> None:
        said = "echo from $(hostname), $(env | grep -c ^RAY_) of Ray; exit 3"
        job = plane.submit(said, resources={"cpus": 1})
        plane.until_status(job, "failed")
        # Its keeper hands the last lines in after its supervisor has told the end.
        until(lambda: any(line.startswith("from n") for line in plane.log_of(job)), "its log comes back")
        assert plane.attempts(job)[-1]["exit_code"] == 3
        assert plane.log_of(job)[0].endswith(", 0 of Ray"), "nothing that Ray set reaches a job"

    def test_a_jobs_checkpoints_are_where_why_says_that_they_are(self, plane: ClusterPlane) -> None:
        job = plane.submit("echo 7 > $SHOAL_CHECKPOINT_DIR/step", resources={"cpus": 1}, checkpoint={})
        plane.until_status(job, "succeeded")
        kept = plane.shared / "checkpoints" / job.job_id
        assert (kept / "step").read_text() == "7\n"
        assert f"checkpoint: {kept}\n" in plane.command("why", job.ref).stdout
