"""FSDP2: every rank keeps a piece of each weight, and gathers a layer's whole weights when it needs them."""

from __future__ import annotations

import group
import sharded
import torch
import torch.distributed as dist
from model import LanguageModel, Shape, batch, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    device, rank, ranks = group.join()
    shape = Shape()
    model = LanguageModel(shape).to(device)
    mesh = init_device_mesh(device.type, (ranks,))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = sharded.load(model, optimizer)
    print(f"rank {rank} of {ranks} begins after step {first}", flush=True)
    for step in range(first, group.STEPS):
        tokens, following = (part.to(device) for part in batch(shape, step, rank, ranks))
        loss = loss_of(model(tokens), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            group.tell(step, loss.item())
        if group.is_time_to_save(step):
            sharded.save(model, optimizer, step)
    print(f"weights {group.fingerprint(model)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
