"""FSDP2: every rank keeps a piece of each weight, and gathers a layer's whole weights when it needs them.

No rank has what another one loses: a group that follows a failure goes on from the last checkpoint, which is
saved in the background. Runs under torchrun as well.
"""

from __future__ import annotations

import os

import group
import torch
import torch.distributed as dist
from model import LanguageModel, Shape, batch, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shoal import runtime


def main() -> None:
    device, rank, ranks = group.join()
    shape = Shape()
    model = LanguageModel(shape).to(device)
    mesh = init_device_mesh(device.type, (ranks,))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    parts = {"model": model, "optimizer": optimizer}
    folder = os.environ.get("SHOAL_CHECKPOINT_DIR", "checkpoints")
    with runtime.Checkpoints(folder, every=group.SAVE_EVERY) as saved:
        first = saved.load(parts) or 0
        print(f"rank {rank} of {ranks} begins after step {first}", flush=True)
        for step in range(first, group.STEPS):
            tokens, following = (part.to(device) for part in batch(shape, step, rank, ranks))
            loss = loss_of(model(tokens), following)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0:
                group.tell(step, loss.item())
                runtime.log(loss=loss.item(), step=step)  # a curve in `shoal metrics`
            if saved.is_due(step + 1) or step + 1 == group.STEPS:
                saved.save(parts, step + 1)
    print(f"weights {group.fingerprint(model)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
