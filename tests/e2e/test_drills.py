"""Each drill, typed as people type it, on a job that trains on two simulated nodes."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from typing import Any

import pytest

from shoal.client.handles import JobHandle
from tests.support.real_plane import RealPlane, until
from tests.support.shares import SOURCE

pytestmark = [
    pytest.mark.serial,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None, reason="torch is not installed: pip install 'shoal[train]'"
    ),
]
told_elsewhere = pytest.mark.soak
"""What `tests/contract/cluster_same_file.py` does too, on this machine as on others."""
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
    """Running, with two checkpoints, and fast enough for a hang to be found by its pace."""
    plane.until_status(running, "running")
    kept = plane.home / "checkpoints" / running.job_id
    until(lambda: len(list(kept.glob("step-*"))) >= 2, "two checkpoints are there")
    return running


def drill(plane: RealPlane, *words: str, window: str = "2s") -> dict[str, Any]:
    done = plane.command("drill", *words, "--window", window, "--json")
    assert done.returncode == 0, (done.stdout, done.stderr)
    told: dict[str, Any] = json.loads(done.stdout)
    return {**told, **told["result"]}


def log_of(plane: RealPlane, job: JobHandle) -> str:
    newest = max(attempt["epoch"] for attempt in plane.attempts(job))
    return "\n".join(line["text"] for line in plane.shoal.logs(job.job_id, attempt=newest))


@pytest.mark.parametrize("rank", [pytest.param("0", marks=pytest.mark.soak), "1"])
def test_a_killed_rank_is_replaced_and_no_step_is_lost(plane: RealPlane, job: JobHandle, rank: str) -> None:
    before = len(plane.attempts(job))
    told = drill(plane, "kill-rank", job.ref, "--rank", rank)
    assert (told["outcome"], told["rank"], told["new_attempts"]) == ("recovered", int(rank), 0)
    assert told["steps_lost"] <= 1
    assert 0 <= told["noticed_s"] <= told["stepped_s"]
    assert 0 < told["goodput"] <= 1
    assert len(plane.attempts(job)) == before


@told_elsewhere
def test_a_rank_that_hangs_is_found_and_replaced(plane: RealPlane, job: JobHandle) -> None:
    told = drill(plane, "hang", job.ref)
    assert (told["outcome"], told["new_attempts"]) == ("recovered", 0)
    assert told["stepped_s"] > told["noticed_s"] > 0.5
    assert "hung and was killed" in " ".join(
        event["data"]["event"]["failure"]["message"]
        for event in plane.shoal.events(job=job.job_id, kind="attempt.regrouped", tail=10)
    )


@pytest.mark.last  # a node looks at its ranks in time once it knows their pace, which takes some steps
def test_stacks_of_a_hang_are_kept_on_every_node(plane: RealPlane, job: JobHandle) -> None:
    def stacks() -> dict[int, str]:
        newest = max(attempt["epoch"] for attempt in plane.attempts(job))
        lines = list(plane.shoal.logs(job.job_id, attempt=newest, stacks=True))
        return {rank: "".join(line["text"] for line in lines if line["rank"] == rank) for rank in (0, 1)}

    before = stacks()
    assert drill(plane, "hang", job.ref)["outcome"] == "recovered"
    added = {rank: text[len(before[rank]) :] for rank, text in stacks().items()}
    # Where the other one stands depends on whose limit is over first: it may have left the group by then.
    assert all("train (" in text or "in train" in text for text in added.values()), added
    assert "program (" in added[1] or "in program" in added[1], "where it was stopped"


@told_elsewhere
def test_a_lost_node_costs_what_was_done_since_the_last_checkpoint(plane: RealPlane, job: JobHandle) -> None:
    nodes = plane.attempts(job)[-1]["nodes"]
    told = drill(plane, "kill-node", job.ref, "--node", nodes[1])
    assert (told["outcome"], told["node"]) == ("recovered", nodes[1])
    assert told["steps_lost"] is not None
    assert told["stepped_s"] >= told["noticed_s"]


@told_elsewhere
def test_a_node_that_is_cut_off_for_a_while_trains_on(plane: RealPlane, job: JobHandle) -> None:
    told = drill(plane, "partition", job.ref, "--for", "2s")
    assert (told["outcome"], told["steps_lost"], told["noticed_s"]) == ("unharmed", 0, None)
    assert told["goodput"] > 0


@told_elsewhere
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(plane: RealPlane, job: JobHandle) -> None:
    told = drill(plane, "corrupt-checkpoint", job.ref)
    assert told["outcome"] == "recovered", told
    assert told["steps_lost"] >= 20, "the work after the one before the newest"
    damaged = told["told"].split()[5]
    assert damaged.startswith("step-")
    assert f"shoal: passing over {damaged}" in log_of(plane, job)


@told_elsewhere
def test_jobs_do_not_notice_that_the_control_plane_is_killed(plane: RealPlane, job: JobHandle) -> None:
    before = plane.attempts(job)
    told = drill(plane, "kill-control")
    assert (told["outcome"], told["job_id"]) == ("recovered", None)
    assert told["noticed_s"] > 0
    assert [attempt["attempt_id"] for attempt in plane.attempts(job)] == [
        attempt["attempt_id"] for attempt in before
    ]


def test_what_came_of_drills_is_kept(plane: RealPlane, job: JobHandle) -> None:
    told = drill(plane, "partition", job.ref, "--for", "1s", window="0s")
    kept = json.loads(plane.command("drill", "history", job.ref, "--json").stdout)
    assert kept[-1]["id"] == told["id"]
    assert kept[-1]["result"] == told["result"]
    assert "partition" in plane.command("drill", "history").stdout


def test_a_job_that_would_end_of_it_is_left_alone(plane: RealPlane) -> None:
    mortal = plane.submit("sleep 600")
    plane.until_status(mortal, "running")
    refused = plane.command("drill", "kill-rank", mortal.ref)
    assert refused.returncode == 3
    assert "has no `retry`: it would end as failed" in refused.stderr
    hung = plane.command("drill", "hang", mortal.ref, "--force")
    # By its supervisor; by the control plane, once the job has run for a while.
    assert hung.returncode in (1, 3)
    assert "told of no step" in hung.stdout + hung.stderr
    assert "nothing was done to it" in hung.stdout + hung.stderr
    forced = plane.command("drill", "kill-rank", mortal.ref, "--force", "--json")
    assert forced.returncode == 1
    assert json.loads(forced.stdout)["result"]["outcome"] == "not recovered"
    plane.until_status(mortal, "failed")
