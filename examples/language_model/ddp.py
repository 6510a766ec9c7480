"""DDP with `shoal.runtime`: a rank that is lost is replaced, and no step is. Runs under torchrun as well.

Every rank holds the whole model and takes its part of each batch. When a peer dies, `train` calls its
function again in the next group, with what the survivors have; when all are gone, with the last checkpoint.
"""

from __future__ import annotations

import os

import group
import torch
from model import LanguageModel, Shape, batch, loss_of
from torch.nn.parallel import DistributedDataParallel

from shoal import runtime


def main() -> None:
    device = group.device()
    torch.manual_seed(0)
    model = LanguageModel(Shape()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    saved = runtime.Checkpoints(os.environ.get("SHOAL_CHECKPOINT_DIR", "checkpoints"), every=group.SAVE_EVERY)

    def train(run: runtime.Run) -> None:
        print(f"rank {run.rank} of {run.world_size} begins after step {run.step}", flush=True)
        replica = DistributedDataParallel(model)
        for step in run.steps(group.STEPS):
            tokens, following = (part.to(device) for part in batch(Shape(), step, run.rank, run.world_size))
            loss = loss_of(replica(tokens), following)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if run.rank == 0:
                group.tell(step, loss.item())
                runtime.log(loss=loss.item(), step=step)  # a curve in `shoal metrics`
        print(f"weights {group.fingerprint(model)}", flush=True)

    parts = {"model": model, "optimizer": optimizer}
    runtime.train(train, parts, backend=group.backend(), checkpoints=saved)


if __name__ == "__main__":
    main()
