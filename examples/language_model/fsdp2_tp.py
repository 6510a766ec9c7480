"""Two dimensions: tensor parallelism inside pairs of ranks, and FSDP2 across the pairs."""

from __future__ import annotations

import group
import sharded
import torch
import torch.distributed as dist
from model import LanguageModel, Shape, batch, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tp import split

PAIR = 2


def main() -> None:
    device, rank, ranks = group.join()
    shape = Shape()
    model = LanguageModel(shape).to(device)
    inside = min(PAIR, ranks)
    mesh = init_device_mesh(device.type, (ranks // inside, inside), mesh_dim_names=("across", "inside"))
    across = mesh["across"]
    split(model, mesh["inside"])
    for layer in model.layers.values():
        fully_shard(layer, mesh=across)
    fully_shard(model, mesh=across)
    # One weight at a time: they are spread over different ranks.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    first = sharded.load(model, optimizer)
    print(f"rank {rank} of {ranks} begins after step {first}", flush=True)
    for step in range(first, group.STEPS):
        text = batch(shape, step, across.get_local_rank(), across.size())
        tokens, following = (part.to(device) for part in text)
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
