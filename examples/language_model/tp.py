"""Tensor parallelism: every rank has some heads of each attention and some columns of each layer's middle."""

from __future__ import annotations

import group
import sharded
import torch
import torch.distributed as dist
from model import LanguageModel, Shape, batch, loss_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def split(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Cut each layer so that it talks twice: after the attention and after the middle."""
    for layer in model.layers.values():
        plan = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        plan |= {"up": ColwiseParallel(), "attention.out": RowwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, mesh, plan)


def main() -> None:
    device, rank, ranks = group.join()
    shape = Shape()
    model = LanguageModel(shape).to(device)
    split(model, init_device_mesh(device.type, (ranks,)))
    # One weight at a time: what is whole on every rank and what is split do not go into one list.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    first = sharded.load(model, optimizer)
    print(f"rank {rank} of {ranks} begins after step {first}", flush=True)
    for step in range(first, group.STEPS):
        tokens, following = (part.to(device) for part in batch(shape, step))  # all ranks, the same text
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
