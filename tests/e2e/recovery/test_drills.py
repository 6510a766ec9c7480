"""Each drill, typed as people type it, on a job that trains on two simulated nodes."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from typing import Any

import pytest

from shoal.client.handles import JobHandle
from tests.support.planes.real import RealPlane, until
from tests.support.runtime.tasks import SOURCE

pytestmark = [
    pytest.mark.serial,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None, reason="torch is not installed: pip install 'shoal[train]'"
    ),
]
told_elsewhere = pytest.mark.soak
"""The same drills as in `tests/contract/cluster/drills.py`, on this machine."""
PROGRAM = """
import os, time
import torch
from torch.nn.parallel import DistributedDataParallel
from shoal import runtime
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

def program(run):
    replica = DistributedDataParallel(model)
    for step in run.steps(1_000_000):
        loss = replica(torch.randn(16, 8)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.02)

saved = runtime.Checkpoints(os.environ["SHOAL_CHECKPOINT_DIR"], every=20, keep=3)
runtime.train(program, {"model": model, "optimizer": optimizer}, checkpoints=saved)
"""


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPlane]:
    real = RealPlane(tmp_path_factory.mktemp("drills") / "home")
    real.up()
    try:
        yield real
    finally:
        real.down()


@pytest.fixture(scope="module")
def running(plane: RealPlane) -> JobHandle:
    return plane.shoal.submit(
        name="train",
        setup=f"cat > train.py <<'END'\n{PROGRAM}\nEND",
        run="python train.py",
        workdir=None,
        resources={"nodes": 2, "gpus": 1},
        ranks_per_node=1,
        checkpoint={},
        retry={"max": 30},
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE},
    )


@pytest.fixture
def job(plane: RealPlane, running: JobHandle) -> JobHandle:
    """A running job with two checkpoints, whose steps are fast enough for a hang to be found by its pace."""
    plane.until_status(running, "running")
    kept = plane.home / "checkpoints" / running.job_id
    until(lambda: len(list(kept.glob("step-*"))) >= 2, "two checkpoints are there")
    return running


def drill(plane: RealPlane, *arguments: str, window: str = "2s") -> dict[str, Any]:
    done = plane.command("drill", *arguments, "--window", window, "--json")
    assert done.returncode == 0, (done.stdout, done.stderr)
    report: dict[str, Any] = json.loads(done.stdout)
    return {**report, **report["result"]}


def log_of(plane: RealPlane, job: JobHandle) -> str:
    newest = max(attempt["epoch"] for attempt in plane.attempts(job))
    return "\n".join(line["text"] for line in plane.shoal.logs(job.job_id, attempt=newest))


@pytest.mark.parametrize("rank", [pytest.param("0", marks=pytest.mark.soak), "1"])
def test_killed_rank_is_replaced_and_no_step_is_lost(plane: RealPlane, job: JobHandle, rank: str) -> None:
    before = len(plane.attempts(job))
    report = drill(plane, "kill-rank", job.ref, "--rank", rank)
    assert (report["outcome"], report["rank"], report["new_attempts"]) == ("recovered", int(rank), 0)
    assert report["steps_lost"] <= 1
    assert 0 <= report["noticed_s"] <= report["stepped_s"]
    assert 0 < report["goodput"] <= 1
    assert len(plane.attempts(job)) == before


@told_elsewhere
def test_hanging_rank_is_found_and_replaced(plane: RealPlane, job: JobHandle) -> None:
    report = drill(plane, "hang", job.ref)
    assert (report["outcome"], report["new_attempts"]) == ("recovered", 0)
    assert report["stepped_s"] > report["noticed_s"] > 0.5
    assert "hung and was killed" in " ".join(
        event["data"]["event"]["failure"]["message"]
        for event in plane.shoal.events(job=job.job_id, kind="attempt.regrouped", tail=10)
    )


@pytest.mark.last  # a node takes snapshots in time once it knows the pace, which takes some steps
def test_stacks_of_a_hang_are_logged_on_every_node(plane: RealPlane, job: JobHandle) -> None:
    def stacks() -> dict[int, str]:
        newest = max(attempt["epoch"] for attempt in plane.attempts(job))
        lines = list(plane.shoal.logs(job.job_id, attempt=newest, stacks=True))
        return {rank: "".join(line["text"] for line in lines if line["rank"] == rank) for rank in (0, 1)}

    before = stacks()
    assert drill(plane, "hang", job.ref)["outcome"] == "recovered"
    added = {rank: text[len(before[rank]) :] for rank, text in stacks().items()}
    # The other rank may have left the group by then, depending on whose limit ends first.
    assert all("train (" in text or "in train" in text for text in added.values()), added
    assert "program (" in added[1] or "in program" in added[1], "where it was stopped"


@told_elsewhere
def test_lost_node_costs_the_work_since_the_last_checkpoint(plane: RealPlane, job: JobHandle) -> None:
    nodes = plane.attempts(job)[-1]["nodes"]
    report = drill(plane, "kill-node", job.ref, "--node", nodes[1])
    assert (report["outcome"], report["node"]) == ("recovered", nodes[1])
    assert report["steps_lost"] is not None
    assert report["stepped_s"] >= report["noticed_s"]


@told_elsewhere
def test_node_cut_off_for_a_while_keeps_training(plane: RealPlane, job: JobHandle) -> None:
    report = drill(plane, "partition", job.ref, "--for", "2s")
    assert (report["outcome"], report["steps_lost"], report["noticed_s"]) == ("unharmed", 0, None)
    assert report["goodput"] > 0


@told_elsewhere
def test_damaged_checkpoint_is_skipped_for_the_one_before(plane: RealPlane, job: JobHandle) -> None:
    report = drill(plane, "corrupt-checkpoint", job.ref)
    assert report["outcome"] == "recovered", report
    assert report["steps_lost"] >= 20, "the work since the checkpoint before the newest"
    damaged = report["told"].split()[5]
    assert damaged.startswith("step-")
    assert f"shoal: passing over {damaged}" in log_of(plane, job)


@told_elsewhere
def test_killed_control_plane_disturbs_no_job(plane: RealPlane, job: JobHandle) -> None:
    before = plane.attempts(job)
    report = drill(plane, "kill-control")
    assert (report["outcome"], report["job_id"]) == ("recovered", None)
    assert report["noticed_s"] > 0
    assert [attempt["attempt_id"] for attempt in plane.attempts(job)] == [
        attempt["attempt_id"] for attempt in before
    ]


def test_results_of_drills_are_recorded(plane: RealPlane, job: JobHandle) -> None:
    report = drill(plane, "partition", job.ref, "--for", "1s", window="0s")
    kept = json.loads(plane.command("drill", "history", job.ref, "--json").stdout)
    assert kept[-1]["id"] == report["id"]
    assert kept[-1]["result"] == report["result"]
    assert "partition" in plane.command("drill", "history").stdout


def test_drill_that_would_end_the_job_is_refused(plane: RealPlane) -> None:
    mortal = plane.submit("sleep 600")
    plane.until_status(mortal, "running")
    refused = plane.command("drill", "kill-rank", mortal.ref)
    assert refused.returncode == 3
    assert "has no `retry`: it would end as failed" in refused.stderr
    hung = plane.command("drill", "hang", mortal.ref, "--force")
    # By its supervisor, or by the control plane once the job has run for a while.
    assert hung.returncode in (1, 3)
    assert "reports no steps" in hung.stdout + hung.stderr
    assert "nothing was done to it" in hung.stdout + hung.stderr
    forced = plane.command("drill", "kill-rank", mortal.ref, "--force", "--json")
    assert forced.returncode == 1
    assert json.loads(forced.stdout)["result"]["outcome"] == "not recovered"
    plane.until_status(mortal, "failed")
