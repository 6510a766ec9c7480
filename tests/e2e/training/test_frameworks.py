"""Programs of several frameworks as their users write them: started as ranks, they find each other."""

from __future__ import annotations

import os

import pytest

from shoal.runtime.process.network import free_port
from shoal.wire import EndKind
from tests.support.runtime.tasks import StartTask, a_task_spec

MEGATRON = """
import argparse, os
import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
parser.add_argument("--distributed-backend", default="nccl")
arguments = parser.parse_args()
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(arguments.distributed_backend, rank=rank, world_size=world)
width = arguments.tensor_model_parallel_size
assert world % (width * arguments.pipeline_model_parallel_size) == 0
groups = [dist.new_group(range(first, first + width)) for first in range(0, world, width)]
part = torch.tensor([float(rank + 1)])
dist.all_reduce(part, group=groups[rank // width])
print("sum", int(part.item()), "of", world, flush=True)
dist.destroy_process_group()
"""
BEHIND_MPIRUN = """
import os
import torch
import torch.distributed as dist

rank, world = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
part = torch.tensor([float(rank + 1)])
dist.all_reduce(part)
print("sum", int(part.item()), "of", world, flush=True)
dist.destroy_process_group()
"""
ACCELERATE = """
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
found = accelerator.gather(torch.tensor([accelerator.process_index + 1]))
assert accelerator.mixed_precision == "bf16"
print("sum", int(found.sum()), "of", accelerator.num_processes, flush=True)
accelerator.end_training()
"""
JAX = """
import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

jax.distributed.initialize()
found = multihost_utils.process_allgather(jnp.array([jax.process_index() + 1]))
print("sum", int(found.sum()), "of", jax.process_count(), flush=True)
jax.distributed.shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "run"),
    [
        pytest.param(
            MEGATRON,
            "torchrun --nproc-per-node 2 train.py --tensor-model-parallel-size 2 --distributed-backend gloo",
            id="megatron",
        ),
        pytest.param(BEHIND_MPIRUN, "mpirun -np 2 python train.py", id="mpirun"),
        pytest.param(
            ACCELERATE,
            "accelerate launch --cpu --mixed_precision bf16 --num_processes 2 train.py",
            id="accelerate",
            marks=pytest.mark.soak,
        ),
        pytest.param(JAX, "python train.py", id="jax"),
    ],
)
def test_two_ranks_of_a_program_find_each_other(start: StartTask, program: str, run: str) -> None:
    share = start(
        a_task_spec(
            setup=f"cat > train.py <<'END'\n{program}\nEND",
            run=run,
            ranks_per_node=2,
            master_port=free_port("127.0.0.1", 97 * os.getpid()),
            env={"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"},
        )
    )
    share.spawn()
    assert share.outcome(100).kind is EndKind.SUCCEEDED, share.describe()
    assert [text for text in share.texts() if text.startswith("sum")] == ["sum 3 of 2"] * 2
