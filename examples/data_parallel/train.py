"""Train a small network data-parallel on CPUs: what torchrun programs look like, unchanged.

Every rank holds a replica and a shard of each batch; gradients are averaged over gloo. Rank 0 saves a
checkpoint every few steps where Shoal says, and a later attempt goes on from there.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = int(os.environ.get("STEPS", "60"))
STEP_S = float(os.environ.get("STEP_S", "0.1"))
"""A pause that stands for the work of a larger network."""
SAVE_EVERY = 10


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(replica.parameters(), lr=1e-2)
    saved = Path(os.environ.get("SHOAL_CHECKPOINT_DIR", ".")) / "last.pt"
    first = load(saved, model, optimizer)
    print(f"rank {rank} of {world_size} starts after step {first}", flush=True)
    for step in range(first + 1, STEPS + 1):
        loss = train_step(replica, optimizer, step, rank, world_size)
        time.sleep(STEP_S)
        if rank == 0:
            print(f"step {step:3d} of {STEPS}  loss {loss:.4f}", flush=True)
        if rank == 0 and (step % SAVE_EVERY == 0 or step == STEPS):
            save(saved, model, optimizer, step)
    dist.destroy_process_group()


def train_step(
    replica: DistributedDataParallel, optimizer: torch.optim.Optimizer, step: int, rank: int, world_size: int
) -> float:
    """One step on this rank's shard; the same batch for the same step, whoever runs it."""
    batch = torch.Generator().manual_seed(step * world_size + rank)
    x = torch.randn(32, 16, generator=batch)
    target = x.pow(2).sum(dim=1, keepdim=True).sqrt()
    loss = torch.nn.functional.mse_loss(replica(x), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def save(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Whole or not at all: a kill in the middle leaves the one before."""
    part = path.with_suffix(".part")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, part)
    part.replace(path)


def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The last step that was saved; 0 where nothing was."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


if __name__ == "__main__":
    main()
