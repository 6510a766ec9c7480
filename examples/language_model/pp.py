"""Pipeline parallelism: every rank has some of the layers, and parts of a batch flow through them."""

from __future__ import annotations

import group
import sharded
import torch
import torch.distributed as dist
from model import LanguageModel, Shape, batch, loss_of
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

PARTS_PER_RANK = 2


def main() -> None:
    device, rank, ranks = group.join()
    shape = Shape()
    cut = [shape.layers * number // ranks for number in range(ranks + 1)]
    model = LanguageModel(shape, range(cut[rank], cut[rank + 1])).to(device)
    stage = PipelineStage(model, rank, ranks, device)
    schedule = Schedule1F1B(stage, n_microbatches=PARTS_PER_RANK * ranks, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = sharded.load(model, optimizer)
    print(f"rank {rank} of {ranks} begins after step {first}", flush=True)
    for step in range(first, group.STEPS):
        tokens, following = (part.to(device) for part in batch(shape, step))
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        schedule.step(
            *([tokens] if stage.is_first else []),
            **({"target": following, "losses": losses} if stage.is_last else {}),
        )
        optimizer.step()
        if stage.is_last:
            group.tell(step, torch.stack(losses).mean().item())
        if group.is_time_to_save(step):
            sharded.save(model, optimizer, step)
    print(f"weights {group.fingerprint(model)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
