"""A node's supervisor is killed with its ranks. Its task is replaced, and the attempt goes on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from shoal.client.handles import JobHandle
from shoal.runtime.files import spool
from tests.support.planes.real import RankGate, RealPlane, running_plane, until
from tests.support.runtime.tasks import SOURCE

RETRY = {"max": 3, "on": ["exit", "signal"]}
TRAIN = """
import hashlib, os, time
import torch
from torch.nn.parallel import DistributedDataParallel
from shoal import runtime
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

def program(run):
    replica = DistributedDataParallel(model)
    for step in run.steps(STEPS):
        x = torch.randn(16, 8)
        loss = (replica(x) - x.sum(dim=1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if os.environ["SHOAL_RENDEZVOUS_ROUND"] == "0":
            time.sleep(0.05)  # until a node is lost; then there is nothing to wait for
        print("step", step, os.getpid(), flush=True)

runtime.train(program, {"model": model, "optimizer": optimizer})
print("done", flush=True)
"""
STEPS = 300
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPlane]:
    with running_plane(tmp_path_factory.mktemp("node") / "home", demo="3x2") as real:
        yield real


def kill_supervisor(plane: RealPlane, attempt: dict[str, Any], node: str) -> None:
    """Kill the node's supervisor. Its ranks die with it."""
    task = spool.SpoolTask(plane.home / "spool" / "live" / attempt["attempt_id"] / node)
    claim = spool.read_claim(task)
    assert claim is not None
    os.kill(claim.pid, signal.SIGKILL)


def lines(job: JobHandle) -> list[tuple[int | None, str]]:
    return [(line["rank"], line["text"]) for line in job.logs()]


@pytest.mark.parametrize("place", [1, 0])
def test_task_of_a_killed_supervisor_is_replaced_and_all_ranks_start_again(
    plane: RealPlane, gate: RankGate, place: int
) -> None:
    job = plane.submit(gate.run_line(), resources={"nodes": 2, "gpus": 2}, retry=RETRY)
    gate.wait_for_ranks(2)
    (before,) = plane.attempts(plane.until_status(job, "running"))
    kill_supervisor(plane, before, before["nodes"][place])
    gate.wait_for_ranks(2)
    assert gate.is_gone(0)
    assert gate.is_gone(1)
    gate.open()
    plane.until_status(job, "succeeded")
    (after,) = plane.attempts(job)
    assert after["attempt_id"] == before["attempt_id"]
    assert (job.data["losses"], job.data["failures"]) == (0, 0)


def test_task_moves_to_another_node_if_its_own_is_cordoned(plane: RealPlane, gate: RankGate) -> None:
    job = plane.submit(gate.run_line(before="echo here;"), resources={"nodes": 2, "gpus": 1}, retry=RETRY)
    gate.wait_for_ranks(2)
    (before,) = plane.attempts(plane.until_status(job, "running"))
    lost = before["nodes"][1]
    assert plane.command("nodes", "cordon", lost, "--because", "drill").returncode == 0
    try:
        kill_supervisor(plane, before, lost)
        gate.wait_for_ranks(2)
        (after,) = plane.attempts(job)
        assert (after["attempt_id"], after["nodes"][0]) == (before["attempt_id"], before["nodes"][0])
        assert after["nodes"][1] not in before["nodes"]
        gate.open()
        plane.until_status(job, "succeeded")
    finally:
        plane.command("nodes", "resume", lost)
    assert {line["node"] for line in job.logs()} == {*before["nodes"], after["nodes"][1]}
    events = json.loads(plane.command("events", "--kind", "plan.made", "--json").stdout)
    (seq,) = [event["seq"] for event in events if event["data"]["replacements"]]
    explanation = plane.command("explain-decision", str(seq))
    assert explanation.returncode == 0, explanation.stdout + explanation.stderr


def test_restarted_control_plane_replaces_a_task_lost_in_the_meantime(
    plane: RealPlane, gate: RankGate
) -> None:
    job = plane.submit(gate.run_line(), resources={"nodes": 2, "gpus": 2}, retry=RETRY)
    gate.wait_for_ranks(2)
    (before,) = plane.attempts(plane.until_status(job, "running"))
    plane.kill()
    kill_supervisor(plane, before, before["nodes"][1])
    plane.up()
    gate.wait_for_ranks(2)
    gate.open()
    plane.until_status(job, "succeeded")
    assert len(plane.attempts(job)) == 1


@pytest.mark.soak
@pytest.mark.parametrize("place", [1, 0])
def test_training_continues_without_losing_a_step_or_the_surviving_process(
    plane: RealPlane, place: int
) -> None:
    setup = f"cat > train.py <<'END'\n{TRAIN.replace('STEPS', str(STEPS))}\nEND"
    job = plane.submit(
        "python train.py",
        setup=setup,
        resources={"nodes": 2, "gpus": 2},
        retry=RETRY,
        env={"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"},
    )
    until(lambda: len(lines(job)) > 60, "some steps are made")
    (before,) = plane.attempts(job)
    kill_supervisor(plane, before, before["nodes"][place])
    plane.until_status(job, "succeeded", "failed")
    log_lines = lines(job)
    assert job.status == "succeeded", log_lines[-40:]
    assert len(plane.attempts(job)) == 1
    stayed = 1 - place
    steps = [text.split() for rank, text in log_lines if rank == stayed and text.startswith("step")]
    assert len({pid for _, _, pid in steps}) == 1, "the process of the other node stayed"
    assert STEPS <= len(steps) <= STEPS + 1
    assert any(f"from rank {stayed}" in text for rank, text in log_lines if rank == place), log_lines[-40:]
