"""A sharded program on two nodes loses one node's memory and its disk, and continues from the other's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.planes.simulated import SimulatedCluster, running_cluster
from tests.support.runtime.torchrun import needs_torch

PROGRAM = """
import os, pathlib, shutil
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from shoal import runtime
from shoal.runtime.files import checkpoint_storage

torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, generation = dist.get_rank(), int(os.environ["SHOAL_RENDEZVOUS_ROUND"])
disk = pathlib.Path(os.environ["SHOAL_CHECKPOINT_DIR"])
if generation == 1:
    attempt_id, node = os.environ["SHOAL_ATTEMPT_ID"], os.environ["SHOAL_NODE"]
    memory = checkpoint_storage.memory_folder(os.getuid(), attempt_id, node)
    print("rank", rank, "has", len(list(pathlib.Path(memory).glob("step-*/*.distcp"))), "shards", flush=True)
    if rank == 1:
        shutil.rmtree(memory)
    else:
        for path in disk.glob("step-*"):
            shutil.rmtree(path)
    dist.barrier()
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 1))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
parts = {"model": model, "optimizer": optimizer}
checkpoints = runtime.Checkpoints(every=5, memory=True)
begun = checkpoints.load(parts) or 0
print("rank", rank, "begins at", begun, flush=True)
for step in range(begun, 12):
    optimizer.zero_grad()
    model(torch.full((4, 8), float(step))).pow(2).mean().backward()
    optimizer.step()
    if checkpoints.is_due(step + 1):
        checkpoints.save(parts, step + 1)
    if generation == 0 and step == 7:
        checkpoints.wait()
        dist.barrier()
        if rank == 1:
            os._exit(3)
checkpoints.wait()
dist.destroy_process_group()
"""
JOB = """
name: spread
run: python spread.py
workdir: .
resources: {nodes: 2, cpus: 1, memory: 2GB}
checkpoint: {}
retry: {max: 2, on: [exit, signal], backoff: 1s}
time_limit: 5m
env: {OMP_NUM_THREADS: "1"}
"""
pytestmark = [pytest.mark.soak, needs_torch]


@pytest.fixture
def shoal(tmp_path: Path) -> Iterator[SimulatedCluster]:
    with running_cluster(tmp_path / "home", "--demo", "2x1") as cluster:
        yield cluster


def test_sharded_training_continues_from_a_neighbours_memory(shoal: SimulatedCluster, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "spread.py").write_text(PROGRAM)
    (work / "job.yaml").write_text(JOB)
    output = shoal("run", str(work / "job.yaml"))
    assert sorted(re.findall(r"rank (\d) has (\d) shards", output)) == [("0", "2"), ("1", "2")]
    assert sorted(re.findall(r"rank (\d) begins at (\d+)", output)) == [
        ("0", "0"),
        ("0", "5"),
        ("1", "0"),
        ("1", "5"),
    ]
